"""torch's own flash kernel for sequences laid end to end (``torch.nn.attention.varlen``), paged since torch 2.13."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable

import torch

from megatron_rl.attention.flash_library import Paged, Spans, flash_backend

_MODULE = "torch.nn.attention.varlen"


def _varlen_attn() -> Callable[..., torch.Tensor]:
    return importlib.import_module(_MODULE).varlen_attn


@functools.cache
def is_paged() -> bool:
    """Whether torch has the kernel, and it reads pages."""
    if importlib.util.find_spec(_MODULE) is None:
        return False
    return "block_table" in inspect.signature(_varlen_attn()).parameters


def _packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: Spans) -> torch.Tensor:
    return _varlen_attn()(
        query, key, value, plan.cu_seqlens, plan.key_cu_seqlens, plan.longest, plan.key_longest,
        window_size=plan.causal_window, enable_gqa=True,
    )  # fmt: skip


def _paged(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: Paged) -> torch.Tensor:
    """One split: how keys are cut would otherwise depend on the batch."""
    return _varlen_attn()(
        query, keys, values, plan.cu_seqlens, None, plan.longest, plan.table.shape[1] * keys.shape[1],
        window_size=plan.causal_window, enable_gqa=True, seqused_k=plan.key_lengths, block_table=plan.table,
        num_splits=1,
    )  # fmt: skip


def _absent() -> str | None:
    return None if is_paged() else "needs torch 2.13 or later"


BACKEND = flash_backend("varlen", _absent, _packed, _paged, ranks=(2, 2))
