"""The device work of the engine: prompts into the cache, decode steps, copies. It knows tensors and no queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListOf
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from megatron_rl.algorithms.counter_random import uniform
from megatron_rl.arithmetic import FEWEST_KEYS
from megatron_rl.attention.backend import NewTokens
from megatron_rl.inference.batch_state import BatchState
from megatron_rl.inference.context import RolloutContext
from megatron_rl.inference.sampler import Sampler, SamplingKinds
from megatron_rl.inference.scheduler import Chunk
from megatron_rl.models import RolloutForward

if TYPE_CHECKING:
    from megatron_rl.inference.graphs import DecodeGraphs

Part = Callable[[int, int, SamplingKinds], None]
"""Of a decode step, by its rows, key length and kinds: device work on static buffers."""


class ModelRunner:
    """Forward passes, draws, and what they leave in the cache and in the state of the batch."""

    def __init__(self, context: RolloutContext, model: RolloutForward, state: BatchState, sampler: Sampler) -> None:
        self.context = context
        self.model = model
        self.state = state
        self.sampler = sampler
        self.graphs: DecodeGraphs | None = None
        """Of `parts`. With them, decode steps are replayed one by one."""

    # -- prompts -------------------------------------------------------------------------------

    def prefill(self, chunks: ListOf[Chunk], kinds: SamplingKinds) -> None:
        """Prompts laid end to end into the cache; the first token of every sequence whose prompt is complete."""
        self._bring_beginnings(chunks)
        for batch in self.passes(chunks):
            logits = self.model.forward(*self._feed(batch))
            rows, places = self._begin(batch)
            if len(rows):
                token, logprob = self._first_tokens(logits, rows, places, kinds)
                self.state.record(rows, token[None], logprob[None])

    @staticmethod
    def passes(chunks: ListOf[Chunk]) -> Iterator[list[Chunk]]:
        """First chunks attend to themselves alone; what begins in the cache takes a second pass."""
        for batch in ([c for c in chunks if c.start == 0], [c for c in chunks if c.start > 0]):
            if batch:
                yield batch

    def copy(self, copies: ListOf[tuple[int, int, int]]) -> None:
        """Carry out `Copies` in the cache."""
        if copies:
            source, destination, lengths = zip(*copies, strict=True)
            self.context.cache.copy(self._to_device(source), self._to_device(destination), max(lengths))

    def _bring_beginnings(self, chunks: ListOf[Chunk]) -> None:
        """First of all, for a later pass may write over what is copied; and one by one, for they may build on others.

        Rows that are not decoded, but computed, must write behind what they hold now.
        """
        for copies in (chunk.before for chunk in chunks if chunk.before):
            self.copy(copies)
            self.state.idle([row for _, row, _ in copies], [length for _, _, length in copies])

    def _feed(self, chunks: ListOf[Chunk]) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and positions [T] of the chunks, for which the context is made ready.

        The forward pass gives the logits of the last token of each; those of a few more rows may follow.
        """
        lengths = [chunk.num_tokens for chunk in chunks]
        cu_seqlens = self._to_device([0, *accumulate(lengths)], torch.int32)
        positions = self._to_device([i for c in chunks for i in range(c.start, c.end)])
        leaders = self._to_device([chunk.rows[0] for chunk in chunks])
        cached = chunks[0].start > 0
        offsets = self._to_device([i for length in lengths for i in range(length)]) if cached else positions
        reach = max(FEWEST_KEYS, *(chunk.end for chunk in chunks))
        self.context.begin_prompts(NewTokens(leaders, lengths, cu_seqlens, offsets, positions, reach), cached)
        return self._to_device([token for c in chunks for token in c.token_ids[c.start : c.end]]), positions

    def _hold(self, chunks: ListOf[Chunk]) -> None:
        """Rows write to the cache while their prompts are computed: where the last token comes, they do no harm."""
        rows = [row for chunk in chunks for row in chunk.rows]
        if rows:
            self.state.idle(rows, [len(chunk.token_ids) - 1 for chunk in chunks for _ in chunk.rows])

    def _begin(self, chunks: ListOf[Chunk]) -> tuple[torch.Tensor, list[int]]:
        """After the forward pass: the rows whose sequences draw now, and the place of each one's chunk."""
        self._hold([chunk for chunk in chunks if not chunk.is_last])
        ready = [(place, chunk) for place, chunk in enumerate(chunks) if chunk.is_last]
        self.copy([copy for _, chunk in ready for copy in chunk.after])
        started = [(sequence, place) for place, chunk in ready for sequence in chunk.sequences]
        rows = self._to_device([sequence.row for sequence, _ in started])
        if started:
            self.state.begin([sequence for sequence, _ in started], rows)
        return rows, [place for _, place in started]

    def _first_tokens(
        self, logits: torch.Tensor, rows: torch.Tensor, places: ListOf[int], kinds: SamplingKinds
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and log-probs [N] that ``rows`` draw from the ``places`` in ``logits``."""
        sampling = self.state.sampling(rows, kinds)
        numbers = uniform(sampling.seeds, self.state.position[rows] + 1)
        return self.sampler(logits.index_select(0, self._to_device(places)), numbers, sampling)

    def _to_device(self, values: ListOf[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.state.device)

    # -- decode steps --------------------------------------------------------------------------

    @property
    def parts(self) -> list[Part]:
        """What a decode step is made of, in this order, for `DecodeGraphs`."""
        return [lambda rows, key_length, kinds: self._burst(rows, key_length, 1, kinds)]

    def decode(self, rows: int, key_length: int, steps: int, kinds: SamplingKinds) -> None:
        """Feed the last tokens of the first rows and draw the next ones, ``steps`` times; the host reads nothing.

        No row's position reaches ``key_length`` in the first of the steps, at least one.
        """
        if self.graphs is None:
            self._burst(rows, key_length, steps, kinds)
            return
        for step in range(steps):
            for part in self.graphs.step(rows, key_length + step, kinds):
                part()

    def _burst(self, rows: int, key_length: int, steps: int, kinds: SamplingKinds) -> None:
        """`decode`, with what the steps have in common computed once."""
        state, context = self.state, self.context
        positions = state.positions_ahead(rows, steps, context.max_sequence_length)
        sampling = state.sampling(slice(0, rows), kinds)
        numbers = uniform(sampling.seeds, positions + 1)
        context.begin_decode(positions, key_length)
        token = state.token[:rows]
        drawn: list[tuple[torch.Tensor, torch.Tensor]] = []
        for at, number in zip(positions, numbers, strict=True):
            context.next_step()
            drawn.append(self.sampler(self.model.forward(token, at), number, sampling))
            token = drawn[-1][0]
        tokens, logprobs = (torch.stack(column) for column in zip(*drawn, strict=True))
        state.record(slice(0, rows), tokens, logprobs)
