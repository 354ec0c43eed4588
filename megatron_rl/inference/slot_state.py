"""The device-resident state of the running sequences: one row a slot, updated in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl.inference.sampler import SamplingTensors
from megatron_rl.types import SamplingParams

_INT_FIELDS = ("token", "position", "count", "limit", "seed", "top_k")


class SlotState:
    """Static buffers, [slots] each; a step reads and writes views of the first N rows.

    ``position`` is where ``token`` (drawn, not yet fed) goes; ``count`` is how many tokens the
    row has produced, ``limit`` how many it may. ``tokens`` and ``logprobs`` are
    [slots, max_new + 1]; the last column takes the writes of finished rows.
    """

    def __init__(
        self, slots: int, max_new_tokens: int, vocab_size: int, device: torch.device, paged: bool = False
    ) -> None:
        """``paged``: the cache is of pages, and a row without a sequence has none of its own."""
        self.device = device
        self._paged = paged
        self.vocab_size = vocab_size
        self.trash = max_new_tokens
        for name in _INT_FIELDS:
            setattr(self, name, torch.zeros(slots, dtype=torch.int64, device=device))
        self.temperature = torch.ones(slots, device=device)
        self.top_p = torch.ones(slots, device=device)
        self.greedy = torch.zeros(slots, dtype=torch.bool, device=device)
        self.alive = torch.zeros(slots, dtype=torch.bool, device=device)
        self.tokens = torch.zeros(slots, max_new_tokens + 1, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(slots, max_new_tokens + 1, device=device)

    def seat(
        self,
        slots: torch.Tensor,
        prompt_lengths: torch.Tensor,
        seeds: torch.Tensor,
        params: Sequence[SamplingParams],
    ) -> None:
        """New sequences in ``slots`` [N]: their prompts are in the cache, nothing is drawn yet."""

        def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        self.position[slots] = prompt_lengths - 1
        self.count[slots] = 0
        self.alive[slots] = True
        self.seed[slots] = seeds
        self.limit[slots] = column([p.max_new_tokens for p in params], torch.int64)
        self.top_k[slots] = column([p.top_k or self.vocab_size for p in params], torch.int64)
        self.top_p[slots] = column([p.top_p for p in params], torch.float32)
        self.greedy[slots] = column([p.greedy for p in params], torch.bool)
        self.temperature[slots] = column(
            [1.0 if p.greedy else p.temperature for p in params], torch.float32
        )

    def sampling(
        self,
        rows: slice | torch.Tensor,
        any_greedy: bool,
        any_filter: bool,
        any_tempered: bool = True,
    ) -> SamplingTensors:
        """Sampling parameters of ``rows``."""
        return SamplingTensors(
            seeds=self.seed[rows],
            temperature=self.temperature[rows],
            greedy=self.greedy[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            any_greedy=any_greedy,
            any_filter=any_filter,
            any_tempered=any_tempered,
        )

    def positions_ahead(self, rows: int, steps: int, max_length: int) -> torch.Tensor:
        """``[steps, rows]``: where the first rows' next tokens go, if none of them ends; below ``max_length``.

        A row that has ended goes on behind its last token; nobody reads what it writes there.
        """
        ahead = torch.arange(steps, device=self.device)[:, None]
        return (self.position[:rows] + ahead).clamp_max_(max_length - 1)

    def record(
        self, rows: slice | torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor, is_stop: torch.Tensor
    ) -> None:
        """Append what k steps drew, ``tokens`` [k, N], to ``rows`` and end those that stopped or are full.

        ``is_stop`` [V] marks end tokens. Tokens drawn after a row's end go to the trash column. Nothing is read
        by the host. What a finished row is fed next does not matter, but its position stays: it must not run
        out of the cache.
        """
        alive, count, position = self.alive[rows], self.count[rows], self.position[rows]
        room = self.limit[rows] - count
        step = torch.arange(tokens.shape[0], device=self.device)[:, None]
        ends = is_stop[tokens]
        ended_before = ends.cumsum(0) - ends.long() if tokens.shape[0] > 1 else torch.zeros_like(tokens)
        kept = alive & (step < room) & (ended_before == 0)
        column = torch.where(kept, count + step, self.trash).t()
        if isinstance(rows, slice):
            self.tokens[rows].scatter_(1, column, tokens.t())
            self.logprobs[rows].scatter_(1, column, logprobs.t())
        else:
            self.tokens[rows[:, None], column] = tokens.t()
            self.logprobs[rows[:, None], column] = logprobs.t()
        added = kept.sum(0)
        count += added
        position += added
        if not isinstance(rows, slice):  # a slice is a view and has been updated in place
            self.count[rows], self.position[rows] = count, position
        self.token[rows] = tokens[-1]
        self.alive[rows] = alive & (added < room) & ~ends.any(0)

    def stop(self, slots: Sequence[int] | None = None) -> None:
        """The rows, or all of them, go idle: they are computed until their slots are filled or closed.

        Without pages of its own a row goes on with one key, and not with as many as it had. In a slot it stays where
        it was: its first cells may be the beginning of another sequence.
        """
        rows = slice(None) if slots is None else torch.tensor(slots, device=self.device)
        self.alive[rows] = False
        if self._paged:
            self.position[rows] = 0

    def move(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy whole rows (compaction)."""
        for buffer in (
            *(getattr(self, name) for name in _INT_FIELDS),
            self.temperature, self.top_p, self.greedy, self.alive, self.tokens, self.logprobs,
        ):
            buffer[destination] = buffer[source]
