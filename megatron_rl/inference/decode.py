"""One decode step: forward, draw, book. Tensor operations on static buffers from end to end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_rl.inference.context import RolloutContext
from megatron_rl.inference.sampler import sample
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
    """Samples the next token of some rows and books it."""

    def __init__(
        self, state: SlotState, is_stop: torch.Tensor, tensor_group: dist.ProcessGroup | None
    ) -> None:
        """``is_stop`` [V] marks end tokens; ``tensor_group`` is None for one rank."""
        self._state = state
        self._is_stop = is_stop
        self._tensor_group = tensor_group

    def __call__(self, logits: torch.Tensor, rows: slice | torch.Tensor, kinds: SamplingKinds) -> None:
        """``logits`` [N, V] fp32 of the N ``rows``."""
        state = self._state
        sampling = state.sampling(rows, kinds.greedy, kinds.filtered, kinds.tempered)
        token, logprob = sample(logits, state.position[rows] + 1, sampling)
        if self._tensor_group is not None:
            # The ranks computed the same logits; if rounding ever made them differ, one draws for
            # all, because ranks that disagree on an end token would wait for each other for ever.
            source = dist.get_global_rank(self._tensor_group, 0)
            dist.broadcast(token, source, group=self._tensor_group)
            dist.broadcast(logprob, source, group=self._tensor_group)
        state.record(rows, token, logprob, self._is_stop)


class DecodeStep:
    """Feeds the last token of the first N rows and draws the next one; the host reads nothing."""

    def __init__(self, context: RolloutContext, state: SlotState, model: RolloutForward, draw: Drawer) -> None:
        self._context = context
        self._state = state
        self._model = model
        self._draw = draw

    def __call__(self, rows: int, key_length: int, kinds: SamplingKinds) -> None:
        """No row's position reaches ``key_length``."""
        positions = self._state.position[:rows]
        self._context.begin_decode(positions, key_length)
        logits = self._model.forward(self._state.token[:rows], positions)
        self._draw(logits, slice(0, rows), kinds)
