"""The embedding of families that multiply it by sqrt(hidden size)."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
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
