"""What may stand at the ends of a model: an embedding times sqrt(hidden size), and the head of a critic."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig


class ScaledEmbedding(LanguageModelEmbedding):
    """megatron's embedding, times `factor`."""

    factor: float

    def forward(self, *args: Any, **settings: Any) -> torch.Tensor:
        """``[B, T]`` ids -> ``[T, B, hidden]``."""
        return super().forward(*args, **settings) * self.factor


def scale_embedding(gpt: GPTModel, config: TransformerConfig) -> None:
    """Scale the embedding from now on, by a factor in the model's dtype as the families' own code has it."""
    gpt.embedding.__class__ = ScaledEmbedding
    gpt.embedding.factor = torch.tensor(math.sqrt(config.hidden_size), dtype=config.params_dtype).item()


class ValueHead(torch.nn.Module):
    """What `GPTModel` calls as its output layer: one number in the place of the logits.

    Every tensor-parallel rank has all of it, and computes all values.

    The weight has the number format of the others, and like them fp32 main parameters: one in another format would
    give megatron's DDP a second buffer. The product is fp32. Zeros at the start: the first advantages are those without
    a critic, and there is no random error to unlearn.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        # Each rank sees its part of the sequence then: megatron adds up the gradients of what has this mark.
        self.weight.sequence_parallel = config.sequence_parallel
        self.sequence_parallel = config.sequence_parallel

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """``[T / ranks, 1, hidden]`` -> ``[T, 1, 1]`` fp32; without sequence parallelism ranks is 1."""
        del weight, runtime_gather_output
        values = functional.linear(input_.float(), self.weight.float())
        if self.sequence_parallel:
            # Every rank computes the same loss of all values, so each takes the gradient of its own part.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None
