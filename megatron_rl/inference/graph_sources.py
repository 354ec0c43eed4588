"""What a decode step reads and others own: weights, their quantised copies, the KV cache.

A captured graph reads addresses. New values in old places are seen by the next replay; another code path or
another place is not, and that is what has to be noticed here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
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
    """Asked before every replay, so it looks at things and never at their contents."""

    def __init__(self, gpt: GPTModel, cache: Cache) -> None:
        self._cache = cache
        self._modules = tuple(gpt.modules())
        self._linears = tuple(parallel_linears(gpt).values())
        self._weights = (*gpt.parameters(), *gpt.buffers())

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the cache holds."""
        return self._cache.max_length

    @property
    def observed(self) -> bool:
        """True while a module has hooks: calibration and audit of quantised layers. A replay would not call them."""
        return any(module._forward_hooks or module._forward_pre_hooks for module in self._modules)

    @property
    def variant(self) -> Variant:
        """See `Variant`."""
        return tuple(None if owner is None else weakref.ref(owner) for owner in self._owners())

    @property
    def generation(self) -> int:
        """Counts how often the cache was given back and made anew, where it does that."""
        return getattr(self._cache, "generation", 0)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Of every buffer."""
        copies = [tensor for owner in self._owners() if owner is not None for tensor in _tensors_of(owner)]
        cached = [tensor for held in vars(self._cache).values() for tensor in _tensors_in(held)]
        return tuple([tensor.data_ptr() for tensor in (*self._weights, *copies, *cached)])

    def _owners(self) -> Iterator[Any]:
        for linear in self._linears:
            forward = vars(linear).get("forward")
            yield getattr(forward, "__self__", forward)


def _tensors_of(owner: Any) -> Iterator[torch.Tensor]:
    weight = getattr(owner, "weight", None)
    return iter(()) if weight is None else weight.tensors()


def _tensors_in(held: Any) -> list[torch.Tensor]:
    if isinstance(held, torch.Tensor):
        return [held]
    return [item for item in held if isinstance(item, torch.Tensor)] if isinstance(held, list) else []
