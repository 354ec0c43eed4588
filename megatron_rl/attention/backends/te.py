"""Transformer Engine's attention over sequences laid end to end; the KV cache is another backend's."""

from __future__ import annotations

import functools
import importlib
import importlib.util

import torch

from megatron_rl.attention.backend import Backend, DeviceFacts, PackedKernel
from megatron_rl.attention.flash_library import Borders, borders_of, half_precision_only

_LIBRARY = "transformer_engine"


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: Borders) -> torch.Tensor:
    heads, width, groups = query.shape[2], query.shape[3], key.shape[2]
    out = attention_module(heads, groups, width)(
        query[:, 0].contiguous(), key[:, 0].contiguous(), value[:, 0].contiguous(),
        cu_seqlens_q=plan.cu_seqlens, cu_seqlens_kv=plan.cu_seqlens,
        max_seqlen_q=plan.longest, max_seqlen_kv=plan.longest,
    )  # fmt: skip
    return out.reshape(query.shape[0], 1, heads * width)


@functools.cache
def attention_module(heads: int, groups: int, width: int) -> torch.nn.Module:
    """It has no parameters; all layers share it."""
    return importlib.import_module(f"{_LIBRARY}.pytorch").DotProductAttention(
        num_attention_heads=heads,
        kv_channels=width,
        num_gqa_groups=groups,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
    )


def _problem(device: DeviceFacts) -> str | None:
    if device.type != "cuda":
        return "needs a CUDA device"
    if importlib.util.find_spec(_LIBRARY) is None:
        return "needs Transformer Engine: pip install 'megatron-rl[te]'"
    return None


BACKEND = Backend("te", _problem, PackedKernel(borders_of, _attend, half_precision_only), cache=None)
