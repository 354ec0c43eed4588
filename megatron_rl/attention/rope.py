"""Rotary position embedding from tables of cosine and sine.

Stock, megatron recomputes cos and sin in every layer and, for packed batches, splits the tensor
by sequence on the host. Here a plan gathers the rows once and every layer reuses them.
"""

from __future__ import annotations

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding


class RopeTable:
    """cos and sin of every position up to ``max_length`` for one model, fp32, [max_length, R].

    ``R`` is the rotated part of a head (`--rotary-percent`). The sign of rotate-half is folded
    into the first half of ``sin``, which saves a negation per layer.
    """

    def __init__(self, embedding: RotaryEmbedding, max_length: int) -> None:
        if embedding.rotary_interleaved:
            raise ValueError("interleaved rotary embeddings are not supported; use the default layout")
        angles = embedding.get_emb(max_length)[:, 0, 0, :]
        self.cos = angles.cos()
        self.sin = angles.sin()
        self.sin[:, : self.sin.shape[-1] // 2] *= -1

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin for ``positions`` [N] int64, each [N, 1, 1, R] in ``dtype``."""
        cos = self.cos.index_select(0, positions)[:, None, None].to(dtype)
        sin = self.sin.index_select(0, positions)[:, None, None].to(dtype)
        return cos, sin


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``heads`` [N, 1, H, D] by its positions; the part beyond R passes unchanged."""
    rotated = cos.shape[-1]
    if rotated < heads.shape[-1]:
        return torch.cat((rotate(heads[..., :rotated], cos, sin), heads[..., rotated:]), dim=-1)
    half = rotated // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
    return torch.addcmul(heads * cos, swapped, sin)
