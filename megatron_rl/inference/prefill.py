"""Prompts into the cache, each once for all its samples, and their first tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_rl.inference.context import RolloutContext
from megatron_rl.inference.decode import Drawer, SamplingKinds
from megatron_rl.inference.kv_cache import Cache
from megatron_rl.inference.slot_state import SlotState
from megatron_rl.models import RolloutForward
from megatron_rl.types import SamplingParams


@dataclass(frozen=True)
class Prompt:
    """A prompt and the samples that are drawn from it."""

    token_ids: Sequence[int]
    slots: tuple[int, ...]
    """One a sample; the first takes the prefill, the others share it."""
    seeds: tuple[int, ...]
    """One a sample."""
    sampling: SamplingParams


class Prefill:
    """Computes prompts laid end to end and draws the first token of every sample."""

    def __init__(
        self, context: RolloutContext, cache: Cache, state: SlotState, model: RolloutForward, drawer: Drawer
    ) -> None:
        self._context = context
        self._cache = cache
        self._state = state
        self._model = model
        self._drawer = drawer

    def __call__(self, prompts: Sequence[Prompt], kinds: SamplingKinds) -> None:
        """All of ``prompts`` in one pass."""
        lengths = [len(prompt.token_ids) for prompt in prompts]
        seats = [
            (slot, source, seed)
            for source, prompt in enumerate(prompts)
            for slot, seed in zip(prompt.slots, prompt.seeds, strict=True)
        ]
        slots = self._to_device([slot for slot, _, _ in seats])
        source = self._to_device([source for _, source, _ in seats])
        logits = self._compute(prompts, lengths).index_select(0, source)
        self._share(prompts, max(lengths))
        self._state.seat(
            slots,
            self._to_device(lengths).index_select(0, source),
            self._to_device([seed for _, _, seed in seats]),
            [prompts[source].sampling for _, source, _ in seats],
        )
        self._drawer.first(logits, slots, kinds)

    def _compute(self, prompts: Sequence[Prompt], lengths: Sequence[int]) -> torch.Tensor:
        """Logits of the last token of each prompt; those of a few more rows may follow."""
        borders = [0]
        for length in lengths:
            borders.append(borders[-1] + length)
        positions = self._to_device([p for length in lengths for p in range(length)])
        leaders = self._to_device([prompt.slots[0] for prompt in prompts])
        self._context.begin_prefill(lengths, self._to_device(borders, torch.int32), positions, leaders)
        ids = self._to_device([token for prompt in prompts for token in prompt.token_ids])
        return self._model.forward(ids, positions)

    def _share(self, prompts: Sequence[Prompt], length: int) -> None:
        followers = [(prompt.slots[0], slot) for prompt in prompts for slot in prompt.slots[1:]]
        if followers:
            first, others = zip(*followers, strict=True)
            self._cache.share(self._to_device(first), self._to_device(others), length)

    def _to_device(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._state.device)
