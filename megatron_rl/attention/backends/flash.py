"""flash-attn: version 3 (``flash_attn_interface``) where it is installed, else version 2 (``flash_attn``)."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

import torch

from megatron_rl.attention.flash_library import Borders, Paged, Spans, flash_backend

_THIRD, _SECOND = "flash_attn_interface", "flash_attn"


@functools.cache
def installed() -> str | None:
    """Looked up, not imported: that takes seconds."""
    return next((name for name in (_THIRD, _SECOND) if importlib.util.find_spec(name) is not None), None)


def _library() -> ModuleType:
    return importlib.import_module(installed())


def _packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: Spans) -> torch.Tensor:
    return _alone(
        _library().flash_attn_varlen_func(
            query, key, value, plan.cu_seqlens, plan.key_cu_seqlens, plan.longest, plan.key_longest, causal=True,
            **_windowed(plan),
        )
    )


def _paged(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: Paged) -> torch.Tensor:
    third = installed() == _THIRD
    table = {"page_table" if third else "block_table": plan.table}
    if third or plan.longest == 1:  # version 2 takes one token a sequence here
        lengths = {"cu_seqlens_q": plan.cu_seqlens, "max_seqlen_q": plan.longest} if plan.longest > 1 else {}
        out = _alone(
            _library().flash_attn_with_kvcache(
                query if lengths else query[:, None], keys, values, cache_seqlens=plan.key_lengths, causal=True,
                **_windowed(plan), **lengths, **table,
            )
        )  # fmt: skip
        return out if lengths else out[:, 0]
    key_borders = torch.nn.functional.pad(plan.key_lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return _library().flash_attn_varlen_func(
        query, keys, values, plan.cu_seqlens, key_borders, plan.longest, plan.key_length, causal=True,
        **_windowed(plan), **table,
    )


def _windowed(plan: Borders) -> dict[str, tuple[int, int]]:
    """Nothing where there is no window, which early releases do not take."""
    return {} if plan.window is None else {"window_size": plan.causal_window}


def _alone(out: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Early releases of version 3 return the log-sum-exp as well."""
    return out[0] if isinstance(out, tuple) else out


def _absent() -> str | None:
    return "needs flash-attn, which is not installed" if installed() is None else None


BACKEND = flash_backend("flash", _absent, _packed, _paged, ranks=(3, 4))
