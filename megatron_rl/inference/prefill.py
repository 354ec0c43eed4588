"""Prompts into the cache, each once for all its samples, and their first tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_rl.attention.backend import NewTokens
from megatron_rl.attention.product import FEWEST_KEYS
from megatron_rl.inference.context import RolloutContext
from megatron_rl.inference.decode import Drawer, SamplingKinds
from megatron_rl.inference.kv_cache import Cache
from megatron_rl.inference.pieces import Piece
from megatron_rl.inference.slot_state import SlotState
from megatron_rl.inference.storage import Copies
from megatron_rl.models import RolloutForward
from megatron_rl.types import SamplingParams


@dataclass(frozen=True)
class Prompt:
    """A stretch of a prompt, and how the samples are drawn from it once it is complete."""

    piece: Piece
    seeds: tuple[int, ...]
    """One a sample."""
    sampling: SamplingParams

    @property
    def length(self) -> int:
        """New tokens."""
        return self.piece.end - self.piece.start


class Prefill:
    """Computes prompts laid end to end and draws the first token of every sample.

    Prompts, and their first stretches, attend to themselves alone; what begins in the cache takes a second pass.
    """

    def __init__(
        self, context: RolloutContext, cache: Cache, state: SlotState, model: RolloutForward, drawer: Drawer
    ) -> None:
        self._context = context
        self._cache = cache
        self._state = state
        self._model = model
        self._drawer = drawer

    def __call__(self, prompts: Sequence[Prompt], kinds: SamplingKinds) -> None:
        """All of ``prompts`` in one pass or two."""
        # First of all: a later pass may write over what is copied.
        self.copy([p.piece.before for p in prompts])
        for batch in ([p for p in prompts if p.piece.start == 0], [p for p in prompts if p.piece.start > 0]):
            if batch:
                logits = self._compute(batch)
                self._hold([p.piece for p in batch if not p.piece.is_last])
                self._begin([(row, p) for row, p in enumerate(batch) if p.piece.is_last], logits, kinds)

    def copy(self, several: Sequence[Copies]) -> None:
        """Carry out copies in the cache, all at once."""
        pairs = [pair for copies in several for pair in copies.pairs]
        if pairs:
            source, destination = (self._to_device(column) for column in zip(*pairs, strict=True))
            self._cache.copy(source, destination, max(copies.length for copies in several))

    def _compute(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        """Logits of the last token of each stretch; those of a few more rows may follow."""
        lengths = [p.length for p in prompts]
        borders = [0]
        for length in lengths:
            borders.append(borders[-1] + length)
        cu_seqlens = self._to_device(borders, torch.int32)
        positions = self._to_device([i for p in prompts for i in range(p.piece.start, p.piece.end)])
        leaders = self._to_device([p.piece.slots[0] for p in prompts])
        if prompts[0].piece.start == 0:
            self._context.begin_prefill(lengths, cu_seqlens, positions, leaders)
        else:
            offsets = self._to_device([i for length in lengths for i in range(length)])
            reach = max(FEWEST_KEYS, *(p.piece.end for p in prompts))
            self._context.begin_extend(NewTokens(leaders, lengths, cu_seqlens, offsets, positions, reach))
        ids = self._to_device([token for p in prompts for token in p.piece.tokens[p.piece.start : p.piece.end]])
        return self._model.forward(ids, positions)

    def _hold(self, pieces: Sequence[Piece]) -> None:
        """Idle rows write to the cache too: where the last token of a prompt comes, they do no harm."""
        slots = [(slot, len(piece.tokens) - 1) for piece in pieces for slot in piece.slots]
        if slots:
            rows, last = (self._to_device(column) for column in zip(*slots, strict=True))
            self._state.alive[rows] = False
            self._state.position[rows] = last

    def _begin(self, ready: Sequence[tuple[int, Prompt]], logits: torch.Tensor, kinds: SamplingKinds) -> None:
        """The samples of prompts that are complete draw from their rows of ``logits``."""
        if not ready:
            return
        self.copy([p.piece.after for _, p in ready])
        seats = [
            (slot, row, prompt, seed)
            for row, prompt in ready
            for slot, seed in zip(prompt.piece.slots, prompt.seeds, strict=True)
        ]
        slots = self._to_device([slot for slot, _, _, _ in seats])
        self._state.seat(
            slots,
            self._to_device([len(prompt.piece.tokens) for _, _, prompt, _ in seats]),
            self._to_device([seed for _, _, _, seed in seats]),
            [prompt.sampling for _, _, prompt, _ in seats],
        )
        self._drawer.first(logits.index_select(0, self._to_device([row for _, row, _, _ in seats])), slots, kinds)

    def _to_device(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._state.device)
