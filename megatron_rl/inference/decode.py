"""Decode steps: forward, draw, book. Tensor operations on static buffers from end to end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_rl.inference.context import RolloutContext
from megatron_rl.inference.sampler import SamplingTensors, draw, uniform
from megatron_rl.inference.slot_state import SlotState
from megatron_rl.models import RolloutForward
from megatron_rl.types import SamplingParams


@dataclass(frozen=True)
class SamplingKinds:
    """What the requests need of the sampler; each that nobody needs saves a pass over [N, V]."""

    greedy: bool = False
    filtered: bool = False
    """Top-k or top-p."""
    tempered: bool = False

    @classmethod
    def of(cls, params: Iterable[SamplingParams]) -> SamplingKinds:
        """Of all requests under way."""
        params = list(params)
        return cls(
            greedy=any(p.greedy for p in params),
            filtered=any(p.top_k > 0 or p.top_p < 1.0 for p in params),
            tempered=any(p.temperature != 1.0 for p in params),
        )


class Drawer:
    """Samples the next token of some rows."""

    def __init__(
        self, state: SlotState, is_stop: torch.Tensor, tensor_group: dist.ProcessGroup | None
    ) -> None:
        """``is_stop`` [V] marks end tokens; ``tensor_group`` is None for one rank."""
        self._state = state
        self._is_stop = is_stop
        self._tensor_group = tensor_group

    def first(self, logits: torch.Tensor, rows: torch.Tensor, kinds: SamplingKinds) -> None:
        """Draw from ``logits`` [N, V] fp32 for the N ``rows``, which are freshly seated, and book it."""
        sampling = self.sampling(rows, kinds)
        token, logprob = self.draw(logits, uniform(sampling.seeds, self._state.position[rows] + 1), sampling)
        self.book(rows, token[None], logprob[None])

    def sampling(self, rows: slice | torch.Tensor, kinds: SamplingKinds) -> SamplingTensors:
        """How ``rows`` are sampled."""
        return self._state.sampling(rows, kinds.greedy, kinds.filtered, kinds.tempered)

    def draw(
        self, logits: torch.Tensor, numbers: torch.Tensor, sampling: SamplingTensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next tokens [N] and their log-probs, the same on all ranks; see `sampler.draw`."""
        token, logprob = draw(logits, numbers, sampling)
        if self._tensor_group is not None:
            # The ranks computed the same logits; if rounding ever made them differ, one draws for
            # all, because ranks that disagree on an end token would wait for each other for ever.
            source = dist.get_global_rank(self._tensor_group, 0)
            dist.broadcast(token, source, group=self._tensor_group)
            dist.broadcast(logprob, source, group=self._tensor_group)
        return token, logprob

    def book(self, rows: slice | torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """What k steps drew, [k, N] each."""
        self._state.record(rows, tokens, logprobs, self._is_stop)


class DecodeBurst:
    """Feeds the last tokens of the first N rows and draws the next ones, k times; the host reads nothing."""

    def __init__(self, context: RolloutContext, state: SlotState, model: RolloutForward, drawer: Drawer) -> None:
        self._context = context
        self._state = state
        self._model = model
        self._drawer = drawer

    def __call__(self, rows: int, key_length: int, steps: int, kinds: SamplingKinds) -> None:
        """No row's position reaches ``key_length`` in the first of ``steps`` steps, at least one."""
        positions = self._state.positions_ahead(rows, steps, self._context.max_sequence_length)
        sampling = self._drawer.sampling(slice(0, rows), kinds)
        numbers = uniform(sampling.seeds, positions + 1)
        self._context.begin_decode(positions, key_length)
        token = self._state.token[:rows]
        drawn: list[tuple[torch.Tensor, torch.Tensor]] = []
        for at, number in zip(positions, numbers, strict=True):
            self._context.next_step()
            drawn.append(self._drawer.draw(self._model.forward(token, at), number, sampling))
            token = drawn[-1][0]
        tokens, logprobs = (torch.stack(column) for column in zip(*drawn, strict=True))
        self._drawer.book(slice(0, rows), tokens, logprobs)
