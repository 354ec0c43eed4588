"""A pipeline stage's share of prompts and decode steps: its chunks of layers, and messages to the other stages.

    receive ─► chunk ─► send ─► pause ─► receive ─► chunk ─► send        the last chunk of the model draws

The steps of a burst run eager, what they have in common computed once; or each chunk of a step is a CUDA graph that
reads and writes static buffers, and the messages go between the replays. The messages are the same, so each stage
may do as it can.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as ListOf
from functools import partial
from typing import Any

import torch

from megatron_rl.algorithms.counter_random import uniform
from megatron_rl.inference.graphs import Work
from megatron_rl.inference.model_runner import ModelRunner, Part
from megatron_rl.inference.sampler import SamplingKinds, SamplingTensors
from megatron_rl.inference.scheduler import Chunk
from megatron_rl.models import PolicyModel
from megatron_rl.parallel.stages import StageMessages

Turns = Generator[None, None, None]
"""Work that pauses wherever it has to wait for another stage."""
Drawn = tuple[torch.Tensor, torch.Tensor]
"""Ids int64 and their log-probs fp32, [N] each."""
Compute = Callable[[int, torch.Tensor], torch.Tensor | Drawn]
"""A chunk's number and what enters it, ids [N] or hidden states [N, hidden] -> what leaves it."""


class StageRunner(ModelRunner):
    """`ModelRunner` on one stage."""

    def __init__(self, policy: PolicyModel, messages: StageMessages, *whole: Any) -> None:
        """``whole``: what `ModelRunner` takes."""
        super().__init__(*whole)
        self._messages = messages
        self._dtype, self._hidden_size = policy.dtype, policy.config.hidden_size
        self._chunks = len(policy.chunks)
        self._mlps = [[layer.mlp for layer in chunk.decoder.layers] for chunk in policy.chunks]
        self._nothing = torch.zeros(1, self._hidden_size, dtype=self._dtype, device=policy.device)
        # What enters and leaves the parts of a step: hidden states here; ids and draws are in ``state.token``.
        rows = self.state.token.shape[0]
        self._entering, self._leaving = self._nothing.new_zeros(2, rows, self._hidden_size)
        self._logprob = torch.zeros(rows, device=policy.device)
        self._ahead = torch.zeros(1, dtype=torch.int64, device=policy.device)
        """Steps of the burst before this one: the state has what was drawn at the end of the burst."""

    def prefill_turns(self, chunks: ListOf[Chunk], kinds: SamplingKinds) -> Turns:
        """See `prefill`."""
        self._bring_beginnings(chunks)
        for batch in self.passes(chunks):
            ids, positions = self._feed(batch)
            logits = yield from self._through(ids, ids.numel(), partial(self.model.chunk, positions=positions))
            rows, places = self._begin(batch)
            drawn = None
            if logits is not None and len(rows):
                drawn = self._first_tokens(logits, rows, places, kinds)
                self._messages.tell_all(*drawn)
            yield
            if len(rows):
                token, logprob = drawn or self._messages.told(len(rows))
                self.state.record(rows, token[None], logprob[None])

    def decode_turns(self, rows: int, key_length: int, steps: int, kinds: SamplingKinds) -> Turns:
        """See `decode`."""
        messages = self._messages
        token, drawn = self.state.token[:rows], list[Drawn]()
        for step, compute in enumerate(self._steps(rows, key_length, steps, kinds)):
            if step > 0 and messages.is_first:
                token = messages.receive(rows, dtype=torch.int64)
            leaving = yield from self._through(token, rows, compute)
            if leaving is not None:
                drawn.append(leaving)
                if step + 1 < steps:
                    messages.send(leaving[0])
            if step + 1 < steps:
                yield
        told = None
        if messages.is_last:
            told = tuple(torch.stack(column) for column in zip(*drawn, strict=True))
            messages.tell_all(*told)
        yield
        self.state.record(slice(0, rows), *(told or messages.told(steps, rows)))

    def join_turns(self, passes: int) -> Turns:
        """As many turns as so many passes take, through this rank's experts alone."""
        for _ in range(passes):
            for chunk, mlps in enumerate(self._mlps):
                if chunk:
                    yield
                for experts in mlps:
                    experts.decode(self._nothing, self.context)
            yield

    def _through(
        self, ids: torch.Tensor, tokens: int, compute: Compute
    ) -> Generator[None, None, Any]:
        """This rank's chunks of the forward pass of ``ids`` [tokens]; what the model's last one gives, else None."""
        messages = self._messages
        for chunk in range(self._chunks):
            if chunk:
                yield
            enters = messages.is_first and chunk == 0
            entering = ids if enters else messages.receive(tokens, self._hidden_size, dtype=self._dtype)
            leaving = compute(chunk, entering)
            if self._draws(chunk):
                return leaving
            messages.send(leaving)
        return None

    def _draws(self, chunk: int) -> bool:
        """Whether it is the model's last one."""
        return self._messages.is_last and chunk == self._chunks - 1

    # -- the steps of a burst: eager, or by graphs ----------------------------------------------

    def _steps(
        self, rows: int, key_length: int, steps: int, kinds: SamplingKinds
    ) -> Iterator[Compute]:
        """What computes the chunks of each step."""
        if self.graphs is not None:
            for step in range(steps):
                yield self._replays(step, rows, key_length + step, kinds)
            return
        state, context = self.state, self.context
        positions = state.positions_ahead(rows, steps, context.max_sequence_length)
        context.begin_decode(positions, key_length)
        sampling = state.sampling(slice(0, rows), kinds)
        numbers = uniform(sampling.seeds, positions + 1) if self._messages.is_last else positions  # which nobody reads
        for at, number in zip(positions, numbers, strict=True):
            context.next_step()
            yield partial(self._compute, at, number, sampling)

    def _compute(
        self, at: torch.Tensor, numbers: torch.Tensor, sampling: SamplingTensors, chunk: int, entering: torch.Tensor
    ) -> torch.Tensor | Drawn:
        leaving = self.model.chunk(chunk, entering, at)
        return self.sampler(leaving, numbers, sampling) if self._draws(chunk) else leaving

    def _replays(self, step: int, rows: int, key_length: int, kinds: SamplingKinds) -> Compute:
        """Through the buffers that graphs know."""
        parts: list[Work] = []

        def replay(chunk: int, entering: torch.Tensor) -> torch.Tensor | Drawn:
            if not parts:
                self._ahead.fill_(step)
                parts.extend(self.graphs.step(rows, key_length, kinds))
            self._entry(chunk)[:rows].copy_(entering)
            parts[chunk]()
            # Copies: the next replay writes there while a message may still be under way.
            if self._draws(chunk):
                return self.state.token[:rows].clone(), self._logprob[:rows].clone()
            return self._leaving[:rows].clone()

        return replay

    @property
    def parts(self) -> list[Part]:
        """A chunk each."""
        return [partial(self._part, chunk) for chunk in range(self._chunks)]

    def _part(self, chunk: int, rows: int, key_length: int, kinds: SamplingKinds) -> None:
        """What a graph holds."""
        context, state = self.context, self.state
        positions = (state.position[:rows] + self._ahead).clamp_max_(context.max_sequence_length - 1)
        context.begin_decode(positions[None], key_length)
        context.next_step()
        leaving = self.model.chunk(chunk, self._entry(chunk)[:rows], positions)
        if self._draws(chunk):
            sampling = state.sampling(slice(0, rows), kinds)
            drawn = self.sampler(leaving, uniform(sampling.seeds, positions + 1), sampling)
            state.token[:rows], self._logprob[:rows] = drawn
        else:
            self._leaving[:rows] = leaving

    def _entry(self, chunk: int) -> torch.Tensor:
        """The buffer of what enters."""
        return self.state.token if self._messages.is_first and chunk == 0 else self._entering
