"""RMSNorm and LayerNorm of plain torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.transformer.transformer_config import TransformerConfig


class TorchNorm(torch.nn.Module):
    """RMSNorm or LayerNorm whose parameters are marked for sequence parallelism.

    megatron's own torch norm refuses sequence parallelism. The mark makes ``finalize_model_grads``
    add up the weight's gradient over the tensor-parallel ranks, which each see a slice of tokens.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self.bias: torch.nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
            self.bias.sequence_parallel = config.sequence_parallel

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        shape = (hidden_states.shape[-1],)
        if self.bias is None:
            return functional.rms_norm(hidden_states, shape, self.weight, self.eps)
        return functional.layer_norm(hidden_states, shape, self.weight, self.bias, self.eps)
