"""The device work of the engine: prefill, decode steps and copies.

    receive ─► chunk ─► send ─► pause ─► receive ─► chunk ─► send        the model's last chunk draws

A pipeline stage has one or more chunks of layers, and pauses while it waits for another stage. Without stages the model
is one chunk that receives its own messages (`OneStage`).

The decode steps between two host reads run eagerly, with shared work done once; or each step is a CUDA graph. On a
pipeline stage each chunk is a graph on static buffers, with messages between replays. The messages are the same, so a
stage whose capture fails runs eagerly without telling the others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as ListOf
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from megatron_rl.arithmetic import FEWEST_KEYS, uniform
from megatron_rl.inference.batch_state import BatchState
from megatron_rl.inference.context import RolloutContext
from megatron_rl.inference.sampler import MOST_SCORED, Sampler, SamplingModes, SamplingTensors, likeliest
from megatron_rl.inference.scheduler import Chunk
from megatron_rl.models.attention.backend import NewTokens
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.models.rollout import RolloutForward
from megatron_rl.platform.collectives import OneStage, StageMessages
from megatron_rl.platform.device import to_device
from megatron_rl.types import TokenScore

if TYPE_CHECKING:
    from megatron_rl.inference.graphs import DecodeGraphs

SCORED_AT_ONCE = 256
"""Prompt positions whose logits are computed at once."""
Pausing = Generator[None, None, None]
"""A generator that yields while it waits for another pipeline stage."""
Drawn = tuple[torch.Tensor, torch.Tensor]
"""Token ids int64 and log-probs fp32, [N] each."""
Compute = Callable[[int, torch.Tensor], torch.Tensor | Drawn]
"""(chunk index, its input: ids [N] or hidden states [N, hidden]) -> its output."""
Part = Callable[[int, int, SamplingModes], None]
"""Part of a decode step on static buffers: (rows, key length, sampling modes)."""


class ModelRunner:
    """Runs forward passes and draws tokens; updates the cache and the batch state."""

    def __init__(
        self, policy: PolicyModel, context: RolloutContext, state: BatchState, sampler: Sampler,
        messages: StageMessages | OneStage,
    ) -> None:  # fmt: skip
        self.context = context
        self.state = state
        if context.cache.states is not None:
            context.cache.states.watch(state.alive)
        self.graphs: DecodeGraphs | None = None
        """Graphs of `parts`; once due, decode steps are replayed one by one."""
        self._forward = RolloutForward(policy, context)
        self._sampler = sampler
        self._messages, self._is_alone = messages, isinstance(messages, OneStage)
        self._chunks = policy.chunks
        # Input and output of the parts of a step: hidden states here; ids and drawn tokens are in ``state.token``.
        rows, device = state.token.shape[0], state.device
        hidden = torch.zeros(2, rows, policy.config.hidden_size, dtype=policy.dtype, device=device)
        self._hidden_in, self._hidden_out = hidden
        self._nothing = torch.zeros_like(hidden[0, :1])
        self._logprob = torch.zeros(rows, device=device)
        self._ahead = torch.zeros(1, dtype=torch.int64, device=device)
        """Decode steps since the last host read: the state gets the drawn tokens only after the last of them."""

    def reset(self) -> None:
        """Clear the rows and recurrent states, so that results do not depend on earlier rollouts."""
        self.state.reset()
        for held in [] if self.context.cache.states is None else self.context.cache.states.tensors:
            held.zero_()

    # -- prompts -------------------------------------------------------------------------------

    def prefill(self, chunks: ListOf[Chunk], modes: SamplingModes) -> Pausing:
        """Compute the chunks, concatenated, and draw the first token of every sequence whose prompt is complete."""
        self._copy_prefixes(chunks)
        for batch in self.passes(chunks):
            ids, positions = self._feed(batch)
            self.context.keeps_hidden = any(self._wants_scores(chunk) for chunk in batch)
            logits = yield from self._run_chunks(ids, partial(self._forward.chunk, positions=positions))
            if self.context.keeps_hidden and self._messages.is_last:
                self._score(batch)
            rows, places = self._begin(batch)
            if len(rows) and self._messages.is_last:
                sampling = self.state.sampling(rows, modes)
                numbers = uniform(sampling.seeds, self.state.position[rows] + 1)
                logits = logits.index_select(0, self._to_device(places))
                self._messages.send_drawn(*self._draw(rows, logits, numbers, sampling))
            yield
            if len(rows):
                token, logprob = self._messages.receive_drawn(len(rows))
                self.state.record(rows, token[None], logprob[None])
        self.copy_states([pair for chunk in chunks for pair in chunk.states_after])

    @staticmethod
    def _wants_scores(chunk: Chunk) -> bool:
        first = chunk.sequences[0]
        return first.request.hints.scores_prompt and len(first.prompt_scores) < len(first.request.prompt_ids) - 1

    def _score(self, chunks: ListOf[Chunk]) -> None:
        """Record log-probs and likeliest tokens of prompt tokens; waits for the device every few positions."""
        at = 0
        for chunk in chunks:
            first, hidden = chunk.sequences[0], self.context.hidden[at : at + chunk.num_tokens]
            at += chunk.num_tokens
            if not self._wants_scores(chunk):
                continue
            del first.prompt_scores[chunk.start :]  # a preempted prompt is scored again
            following = self._to_device(first.request.prompt_ids[chunk.start + 1 : chunk.end + 1])
            parts = (each[: len(following)].split(SCORED_AT_ONCE) for each in (hidden, following))
            for part, ids in zip(*parts, strict=True):
                logprobs = self._forward.logits(part).log_softmax(-1)
                own = logprobs.gather(-1, ids[:, None])[:, 0].tolist()
                values, tokens = logprobs.topk(min(MOST_SCORED, logprobs.shape[-1]), -1)
                for score, row, top in zip(own, tokens.tolist(), values.tolist(), strict=True):
                    first.prompt_scores.append(TokenScore(score, tuple(zip(row, top, strict=True))))
        self.context.hidden = None

    @staticmethod
    def passes(chunks: ListOf[Chunk]) -> list[list[Chunk]]:
        """Split chunks into at most two passes: those that start a prompt, and those that continue one in the cache."""
        batches = [c for c in chunks if c.start == 0], [c for c in chunks if c.start > 0]
        return [batch for batch in batches if batch]

    def copy(self, copies: ListOf[tuple[int, int, int]]) -> None:
        """Copy cached keys and values between blocks or rows: (source, destination, tokens)."""
        if copies:
            *places, lengths = zip(*copies, strict=True)
            self.context.cache.copy(*self._to_device(places), max(lengths))

    def move(self, moves: ListOf[tuple[int, int]], copies: ListOf[tuple[int, int, int]]) -> None:
        """Move sequences between rows (from, to), with the ``copies`` of their keys and values."""
        self.state.swap_rows(moves)
        self.copy(copies)
        self.copy_states(moves)

    def copy_states(self, pairs: ListOf[tuple[int, int]]) -> None:
        """Copy recurrent states between rows, if there are any; for two copies to one row the last wins."""
        if self.context.cache.states is not None and pairs:
            sources = {destination: source for source, destination in pairs}
            self.context.cache.states.copy(*self._to_device([[*sources.values()], [*sources]]))

    def _copy_prefixes(self, chunks: ListOf[Chunk]) -> None:
        """Copy cached prefixes before any pass overwrites them; in order, because they may depend on each other.

        Idle rows are computed too, so they must write behind their new prefix.
        """
        self.copy_states([pair for chunk in chunks for pair in chunk.states_before])
        for copies in (chunk.before for chunk in chunks if chunk.before):
            self.copy(copies)
            if not self.state.paged:
                self.state.mark_idle([row for _, row, _ in copies], [length for _, _, length in copies])

    def _feed(self, chunks: ListOf[Chunk]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and positions [T] of the chunks, and prepare the context for them.

        The forward pass gives the logits of the last token of each chunk, and possibly a few padding rows.
        """
        lengths = [chunk.num_tokens for chunk in chunks]
        cu_seqlens = self._to_device([0, *accumulate(lengths)], torch.int32)
        ids = [token for c in chunks for token in c.token_ids[c.start : c.end]]
        ids, positions = self._to_device([ids, [i for c in chunks for i in range(c.start, c.end)]])
        leaders = self._to_device([chunk.rows[0] for chunk in chunks])
        key_length = max(FEWEST_KEYS, *(chunk.end for chunk in chunks))
        new = NewTokens(leaders, lengths, cu_seqlens, positions, key_length)
        self.context.begin_prompts(new, cached=chunks[0].start > 0)
        return ids, positions

    def _begin(self, chunks: ListOf[Chunk]) -> tuple[torch.Tensor, list[int]]:
        """Return, after the forward pass, the rows that draw now, and the index of each one's chunk."""
        # Rows are written during decode steps while their prompts are computed: the last position is rewritten anyway.
        held = [(row, len(chunk.token_ids) - 1) for chunk in chunks if not chunk.is_last for row in chunk.rows]
        if held:
            self.state.mark_idle([row for row, _ in held], [position for _, position in held])
        ready = [(place, chunk) for place, chunk in enumerate(chunks) if chunk.is_last]
        self.copy([copy for _, chunk in ready for copy in chunk.after])
        self.copy_states([(chunk.rows[0], row) for _, chunk in ready for row in chunk.rows[1:]])
        started = [(sequence, place) for place, chunk in ready for sequence in chunk.sequences]
        rows = self._to_device([sequence.row for sequence, _ in started])
        if started:
            self.state.begin([sequence for sequence, _ in started], rows)
        return rows, [place for _, place in started]

    def _draw(
        self, rows: slice | torch.Tensor, logits: torch.Tensor, numbers: torch.Tensor, sampling: SamplingTensors
    ) -> Drawn:
        if sampling.scored:
            self.state.store_scores(rows, *likeliest(logits, sampling))
        return self._sampler(logits, numbers, sampling)

    def _to_device(self, values: ListOf[int] | ListOf[ListOf[int]], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return to_device(values, self.state.device, dtype)

    # -- decode steps --------------------------------------------------------------------------

    def decode(self, rows: int, key_length: int, steps: int, modes: SamplingModes) -> Pausing:
        """Feed the last tokens of the first rows and draw the next ones, ``steps`` times, without a host read.

        All positions of the first step are below ``key_length``; ``steps`` is at least 1.
        """
        if self.graphs is None or not self.graphs.is_due(steps):
            yield from self._decode(rows, steps, self._eager(rows, key_length, steps, modes))
        elif not self._is_alone:
            yield from self._decode(rows, steps, self._replayed(rows, key_length, steps, modes))
        else:
            for step in range(steps):
                for part in self.graphs.step(rows, key_length + step, modes):
                    part()

    def _decode(self, rows: int, steps: int, computes: Iterator[Compute]) -> Pausing:
        """Do one decode step per entry of ``computes``, then record the drawn tokens."""
        messages = self._messages
        token, drawn = self.state.token[:rows], list[Drawn]()
        for step, compute in enumerate(computes):
            if step > 0:
                yield
                if messages.is_first:
                    token = messages.receive(rows, dtype=torch.int64)
            outputs = yield from self._run_chunks(token, compute)
            if messages.is_last:
                drawn.append(outputs)
                if step + 1 < steps:
                    messages.send(outputs[0])
                    self._keep_ended(outputs[0], step + 1)
        if messages.is_last:
            messages.send_drawn(*map(_stacked, zip(*drawn, strict=True)))
        yield
        self.state.record(slice(0, rows), *messages.receive_drawn(steps, rows))

    def _keep_ended(self, drawn: torch.Tensor, steps: int) -> None:
        """Freeze the recurrent states of rows that ended with ``drawn`` [N], the token of step number ``steps``.

        The next turn continues from them, but the batch records the end only after the last step. Pipeline stages
        cannot do it: only the last one knows the drawn tokens.
        """
        state, states = self.state, self.context.cache.states
        if states is not None and self._is_alone:
            rows = len(drawn)
            states.end(state.is_stop[drawn] | (state.limit[:rows] - state.count[:rows] <= steps))

    def run_dummy_passes(self, passes: int) -> Pausing:
        """Feed a dummy token ``passes`` times so that expert-parallel collectives match."""
        for _ in range(passes):
            for number, chunk in enumerate(self._chunks):
                if number:
                    yield
                for layer in chunk.decoder.layers:
                    layer.mlp.run_dummy_pass(self._nothing, self.context)
            yield

    def _run_chunks(self, ids: torch.Tensor, compute: Compute) -> Generator[None, None, Any]:
        """Run this rank's chunks of layers on ``ids`` [N]; return the output of the model's last chunk, else None."""
        messages = self._messages
        for chunk in range(len(self._chunks)):
            if chunk:
                yield
            inputs = ids
            if chunk or not messages.is_first:
                inputs = messages.receive(ids.numel(), self._nothing.shape[1], dtype=self._nothing.dtype)
            outputs = compute(chunk, inputs)
            if self._draws(chunk):
                return outputs
            messages.send(outputs)
        return None

    def _draws(self, chunk: int) -> bool:
        """Return whether the chunk is the model's last one."""
        return self._messages.is_last and chunk == len(self._chunks) - 1

    # -- what computes each step: eager, or by graphs ------------------------------------------

    def _eager(self, rows: int, key_length: int, steps: int, modes: SamplingModes) -> Iterator[Compute]:
        """Yield a computation for each step; shared work is done once."""
        state, context = self.state, self.context
        positions, numbers = state.ahead(rows, steps, context.max_sequence_length, self._messages.is_last)
        context.begin_decode(positions, key_length)
        sampling = state.sampling(slice(0, rows), modes)
        for at, number in zip(positions, numbers, strict=True):
            context.next_step()
            yield partial(self._compute, at, number, sampling)

    def _compute(
        self, at: torch.Tensor, numbers: torch.Tensor, sampling: SamplingTensors, chunk: int, inputs: torch.Tensor
    ) -> torch.Tensor | Drawn:
        outputs = self._forward.chunk(chunk, inputs, at)
        return self._draw(slice(0, len(at)), outputs, numbers, sampling) if self._draws(chunk) else outputs

    def _replayed(self, rows: int, key_length: int, steps: int, modes: SamplingModes) -> Iterator[Compute]:
        """Yield a computation for each step, on the static buffers of graphs."""
        for step in range(steps):
            yield partial(self._replay, step, rows, key_length + step, modes)

    def _replay(
        self, step: int, rows: int, key_length: int, modes: SamplingModes, chunk: int, inputs: torch.Tensor
    ) -> torch.Tensor | Drawn:
        if chunk == 0:
            self._ahead.fill_(step)
            self._replays = self.graphs.step(rows, key_length, modes)
        self._entry(chunk)[:rows].copy_(inputs)
        self._replays[chunk]()
        # Copies: the next replay overwrites the buffers while a message may still be in flight.
        if self._draws(chunk):
            return self.state.token[:rows].clone(), self._logprob[:rows].clone()
        return self._hidden_out[:rows].clone()

    @property
    def parts(self) -> list[Part]:
        """List the parts of a decode step, for `DecodeGraphs`: one, or on a pipeline stage one per chunk."""
        return [self._whole] if self._is_alone else [partial(self._part, chunk) for chunk in range(len(self._chunks))]

    def _whole(self, rows: int, key_length: int, modes: SamplingModes) -> None:
        for _ in self._decode(rows, 1, self._eager(rows, key_length, 1, modes)):
            pass  # nobody to wait for

    def _part(self, chunk: int, rows: int, key_length: int, modes: SamplingModes) -> None:
        context, state = self.context, self.state
        positions = (state.position[:rows] + self._ahead).clamp_max_(context.max_sequence_length - 1)
        context.begin_decode(positions[None], key_length)
        context.next_step()
        outputs = self._forward.chunk(chunk, self._entry(chunk)[:rows], positions)
        if self._draws(chunk):
            sampling = state.sampling(slice(0, rows), modes)
            drawn = self._draw(slice(0, rows), outputs, uniform(sampling.seeds, positions + 1), sampling)
            state.token[:rows], self._logprob[:rows] = drawn
        else:
            self._hidden_out[:rows] = outputs

    def _entry(self, chunk: int) -> torch.Tensor:
        """Return the input buffer of ``chunk``."""
        return self.state.token if self._messages.is_first and chunk == 0 else self._hidden_in


def _stacked(steps: ListOf[torch.Tensor]) -> torch.Tensor:
    """Stack k steps, [N] each -> [k, N]; a view for one step."""
    return torch.stack(steps) if len(steps) > 1 else steps[0][None]
