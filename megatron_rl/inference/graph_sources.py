"""What a decode step reads and others own: weights, their quantised copies, the KV cache.

A captured graph reads addresses. New values in old places are seen by the next replay; another code path or
another place is not, and that is what has to be noticed here.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from megatron_rl.inference.kv_cache import Cache
from megatron_rl.quantization.linears import parallel_linears

Variant = tuple[weakref.ref | None, ...]
"""What stands in for the ``forward`` of every linear layer; None where it runs as it is.

Quantised copies put on and taken off again give the same variant, those of another recipe give another one. All
ranks see the same changes, which addresses do not promise. The references keep nothing alive.
"""


class StepSources:
    """Asked before every replay, while the device is busy with the last one: it has to stay well below a step."""

    def __init__(self, gpt: GPTModel, cache: Cache) -> None:
        self._cache = cache
        self._hooks = [hooks for m in gpt.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._attributes = [vars(linear) for linear in parallel_linears(gpt).values()]
        self._weights = (*gpt.parameters(), *gpt.buffers())

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the cache holds."""
        return self._cache.max_length

    @property
    def observed(self) -> bool:
        """True while a module has hooks: calibration and audit of quantised layers. A replay would not call them."""
        return any(self._hooks)

    @property
    def variant(self) -> Variant:
        """See `Variant`."""
        return tuple([_owner(attributes.get("forward")) for attributes in self._attributes])

    @property
    def generation(self) -> int:
        """Counts how often the cache was given back and made anew, where it does that."""
        return getattr(self._cache, "generation", 0)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Of weights and cache. Quantised copies are never replaced: new ones have new owners, see `variant`."""
        cached = [tensor for held in vars(self._cache).values() for tensor in _tensors_in(held)]
        return tuple(map(torch.Tensor.data_ptr, (*self._weights, *cached)))


def _owner(forward: Any) -> weakref.ref | None:
    return None if forward is None else weakref.ref(getattr(forward, "__self__", forward))


def _tensors_in(held: Any) -> list[torch.Tensor]:
    if isinstance(held, torch.Tensor):
        return [held]
    return held if isinstance(held, list) and held and isinstance(held[0], torch.Tensor) else []
