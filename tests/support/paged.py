"""Paged caches filled at random, and attention over them written out in fp64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl.arithmetic import FEWEST_KEYS
from megatron_rl.families import LayerCache
from megatron_rl.inference.kv_cache import PagedCache
from megatron_rl.models.attention.backend import CacheKernel, NewTokens
from megatron_rl.models.attention.plan import prepared_for


def naive(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """One query ``[heads, D]`` over keys and values ``[K, groups, D]`` -> ``[heads * D]``, in fp64."""
    heads, width = query.shape
    share = heads // keys.shape[1]
    outputs = []
    for head in range(heads):
        scores = keys[:, head // share].double() @ query[head].double() / width**0.5
        rest = scores.new_empty(0) if sinks is None else sinks[head, None].double()
        weights = torch.cat((scores, rest)).softmax(0)[: len(scores)]
        outputs.append(weights @ values[:, head // share].double())
    return torch.cat(outputs)


class FilledPages:
    """A cache whose pages lie in random order; what no sequence wrote is NaN, so reading it shows."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        block_size: int = 16,
        heads: int = 4,
        groups: int = 2,
        width: int = 16,
        dtype: torch.dtype = torch.float32,
        stored: torch.dtype | None = None,
        max_length: int | None = None,
        device: str = "cpu",
        sinks: Sequence[float] = (),
        window: int | None = None,
        seed: int = 0,
    ) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self.lengths, self.heads, self.width, self.dtype, self.device = list(lengths), heads, width, dtype, device
        self._window = window
        self.stretch = 1.0
        """What queries are multiplied by."""
        self._sinks = (torch.tensor(sinks, dtype=dtype, device=device),) if sinks else ()
        layers, longest = [LayerCache(groups, width, width)], max_length or max(lengths)
        self.cache = PagedCache(layers, len(lengths), longest, block_size, dtype, torch.device(device), stored)
        order = torch.randperm(self.cache.table.numel(), generator=self._random).view(self.cache.table.shape)
        self.cache.table.copy_(order + 1)
        self._poison()
        for slot, length in enumerate(lengths):
            key, value = (self.random(length, 1, groups, width) for _ in range(2))
            self.cache.format.calibrate(0, key, value)
            places = self.cache.slot_mapping(self._tensor([slot] * length), torch.arange(length, device=device))
            self.cache.write(0, places, key, value)

    def random(self, *size: int) -> torch.Tensor:
        """Normal numbers of the cache's model."""
        return torch.randn(size, generator=self._random).to(self.device, self.dtype)

    def known(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the slot holds as numbers, [length, groups, D] fp32 each, by way of the table."""
        places = self.cache.slot_mapping(
            self._tensor([slot] * self.lengths[slot]), torch.arange(self.lengths[slot], device=self.device)
        )
        held = self.cache.keys[0], self.cache.values[0]
        rows = [buffer.flatten(0, 1)[places][None].transpose(1, 2) for buffer in held]
        return tuple(numbers[0].transpose(0, 1).float() for numbers in self.cache.format.unpack(0, *rows))

    def decoded(self, kernel: CacheKernel) -> tuple[torch.Tensor, torch.Tensor]:
        """The newest token of every sequence: the kernel's answer and the fp64 one, ``[N, heads * D]``."""
        rows = len(self.lengths)
        query = self.random(rows, 1, self.heads, self.width) * self.stretch
        batch = self.cache, self._tensor(self.lengths) - 1, max(*self.lengths, FEWEST_KEYS)
        plan = prepared_for(self._window, kernel.prepare_decode, *batch)
        actual = kernel.decode(query, self.cache, 0, plan, *self._sinks)[:, 0]
        expected = [self._naive(query[row, 0], *self.known(row)) for row in range(rows)]
        return actual.double(), torch.stack(expected)

    def extended(self, kernel: CacheKernel, starts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """All tokens from ``starts`` on, the last sequence first; as `decoded`."""
        slots = list(range(len(self.lengths)))[::-1]
        spans = [(starts[slot], self.lengths[slot]) for slot in slots]
        counts = [end - start for start, end in spans]
        new = NewTokens(
            rows=self._tensor(slots),
            lengths=counts,
            cu_seqlens=torch.tensor([0, *counts], device=self.device).cumsum(0).int(),
            position_ids=torch.cat([torch.arange(*span, device=self.device) for span in spans]),
            key_length=max(self.lengths),
        )
        query = self.random(sum(counts), 1, self.heads, self.width) * self.stretch
        plan = prepared_for(self._window, kernel.prepare_extend, self.cache, new)
        actual = kernel.extend(query, self.cache, 0, plan, *self._sinks)[:, 0]
        expected, token = [], 0
        for slot, (start, end) in zip(slots, spans, strict=True):
            keys, values = self.known(slot)
            for position in range(start, end):
                expected.append(self._naive(query[token, 0], keys[: position + 1], values[: position + 1]))
                token += 1
        return actual.double(), torch.stack(expected)

    def _naive(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        seen = slice(None if self._window is None else -self._window, None)
        return naive(query.float(), keys[seen], values[seen], *self._sinks)

    def _poison(self) -> None:
        nan = 0x7F if self.cache.format.storage == torch.uint8 else float("nan")
        for buffer in (*self.cache.keys, *self.cache.values):
            buffer.fill_(nan)

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, device=self.device)
