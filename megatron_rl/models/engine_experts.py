"""Experts whose training products are Transformer Engine's, in fp8 if the flags say so.

The parameters stay the two stacks of `GroupedExperts`; Transformer Engine's grouped linear is called with views of
them. So names, checkpoints, optimizer and quantised copies are those of local layers, and the products and the padding
those of megatron's `TEGroupedMLP`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.fp8_utils import get_fp8_context
from torch.func import functional_call
from transformer_engine.pytorch import Fp8Padding, Fp8Unpadding, GroupedLinear

from megatron_rl.models import override
from megatron_rl.models.blocks.experts import GroupedExperts
from megatron_rl.models.expert_ops import Dispatched, ExpertOps
from megatron_rl.quantization.copies import StackedLinear, runs_quantized


class EngineStack(StackedLinear):
    """A stack that uses Transformer Engine's product when the host knows the number of tokens per expert."""

    def __init__(self, weight: torch.nn.Parameter, *args: Any) -> None:
        """``args``: as in `StackedLinear`, which also adds the bias."""
        super().__init__(weight, *args)
        experts, rows, columns = weight.shape
        grouped = GroupedLinear(
            experts, columns, rows, bias=False, params_dtype=weight.dtype, device=weight.device,
            init_method=lambda drawn: drawn,
        )  # fmt: skip
        # In a tuple, so that its unused weights are not registered, saved or trained.
        self._grouped = (grouped.to("meta"),)
        self.sizes: list[int] | None = None
        """Tokens of each expert."""

    def forward(self, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Compute like `StackedLinear`."""
        if self.sizes is None:
            return super().forward(tokens, ends)
        weights = {f"weight{expert}": weight for expert, weight in enumerate(self.weight.unbind())}
        return functional_call(self._grouped[0], weights, (tokens, self.sizes))


class EngineExperts(GroupedExperts):
    """The experts of a Transformer Engine layer.

    Rollouts use torch's grouped product or that of quantised copies, without a host read. In fp8 without copies they
    use the training product, so that log-probs agree.
    """

    linear = EngineStack

    def __init__(self, num_local_experts: int, *args: Any, **named: Any) -> None:
        super().__init__(num_local_experts, *args, **named)
        self._pad, self._unpad = Fp8Padding(num_local_experts), Fp8Unpadding(num_local_experts)

    def forward(
        self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, probabilities: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Run like `GroupedExperts`; for fp8 each expert's tokens are padded."""
        sizes = tokens_per_expert.tolist()
        if not self.config.fp8:
            with self._using_sizes(sizes):
                return super().forward(tokens, tokens_per_expert, probabilities)
        # megatron enters it around a layer, but not for dummy passes.
        with get_fp8_context(self.config):
            padded, wider = self._pad(tokens, sizes)
            shares, _ = self._pad(probabilities[:, None], sizes)
            with self._using_sizes(wider):
                output, _ = super().forward(padded, torch.tensor(wider), shares[:, 0])
            return self._unpad(output, sizes), None

    def decode(self, dispatched: Dispatched, ops: ExpertOps) -> torch.Tensor:
        """Run `forward` on dispatched rollout tokens: [N, hidden]."""
        if not self.config.fp8 or all(map(runs_quantized, (self.linear_fc1, self.linear_fc2))):
            return super().decode(dispatched, ops)
        sizes = dispatched.ends.diff(prepend=dispatched.ends.new_zeros(1)).cpu()
        count = int(sizes.sum())
        output, _ = self.forward(dispatched.rows[:count], sizes, dispatched.shares[:count])
        return functional.pad(output, (0, 0, 0, len(dispatched.rows) - count))

    def _using_sizes(self, sizes: list[int]) -> AbstractContextManager[None]:
        return override("sizes", {self.linear_fc1: sizes, self.linear_fc2: sizes})
