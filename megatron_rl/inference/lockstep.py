"""The rollout engine where other copies of the model hold some of the experts: all make their passes together.

    rank 0   prefill  decode  decode  decode
    rank 1      -     decode  decode     -          - : a token of nothing through the experts alone

Every step begins with one exchange of how many passes each rank has before it. Which experts a rank has does not depend
on its samples, so whoever has fewer joins in the others' passes with a token that nobody reads.

With CUDA graphs the decode steps of all ranks are alike: as many, of as many rows, that reach as far and draw in the
same ways. A rank has its other rows idle. So all replay the same graph, and capture together what they have not yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_rl.inference.engine import EngineOptions
from megatron_rl.inference.model_runner import ModelRunner
from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.inference.sampler import SamplingKinds
from megatron_rl.inference.sequence import Sequence
from megatron_rl.models import PolicyModel
from megatron_rl.parallel import ParallelGroups
from megatron_rl.parallel.collectives import max_over
from megatron_rl.types import Completed

logger = logging.getLogger(__name__)


class Most(NamedTuple):
    """The most that any rank of a lockstep group has before it."""

    passes: int
    """Over prompts."""
    rows: int
    """Of a decode step."""
    reach: int
    """Of the first decode step: see `ModelRunner.decode`."""
    steps: int
    greedy: bool
    filtered: bool
    tempered: bool

    @classmethod
    def of(
        cls, passes: int, burst: tuple[int, int, int], kinds: SamplingKinds, lockstep_group: dist.ProcessGroup
    ) -> Most:
        """Collective; each rank says what it has. ``burst`` are rows, reach and steps."""
        own = dict(zip(cls._fields, (passes, *burst, kinds.greedy, kinds.filtered, kinds.tempered), strict=True))
        return cls(*(int(number) for number in max_over(own, lockstep_group).values()))

    @property
    def kinds(self) -> SamplingKinds:
        """Every way to draw that some rank has."""
        return SamplingKinds(bool(self.greedy), bool(self.filtered), bool(self.tempered))

    def burst_of_all(self, running: ListOf[Sequence], steps: int) -> tuple[int, int, int] | None:
        """Rows, reach and steps that all ranks make alike, of which the ``running`` sequences here count ``steps``.

        They have ended by then, but count the others, too. None where no rank has any.
        """
        for sequence in running:
            sequence.num_generated += self.steps - steps
        return (self.rows, self.reach, self.steps) if self.steps else None


NOTHING = 1, 0, 0
"""Rows, reach and steps of a rank without sequences: it joins in with one token."""


class LockstepEngine(RolloutEngine):
    """All ranks of the lockstep group step while one of them has unfinished requests."""

    def __init__(
        self,
        policy: PolicyModel,
        options: EngineOptions,
        stop_token_ids: ListOf[int],
        decode_text: Callable[[ListOf[int]], str],
        groups: ParallelGroups,
    ) -> None:
        super().__init__(policy, options, stop_token_ids, decode_text, groups.tensor_group)
        self._lockstep_group = groups.lockstep_group
        self._expert_layers = [layer.mlp for layer in policy.gpt.decoder.layers]
        self._nothing = torch.zeros(1, policy.config.hidden_size, dtype=policy.dtype, device=policy.device)
        if not graphs_alike(self.runner, self.max_batch_size, groups):
            self.runner.graphs = None

    @torch.inference_mode()
    def step(self) -> list[Completed]:
        """See `RolloutEngine.step`; collective over the lockstep group."""
        chunks, kinds = self._plan()
        running = self._scheduler.running
        burst = self._next_burst(running) if running else None
        passes, (_, _, steps) = len([*self.runner.passes(chunks)]), burst or NOTHING
        most = Most.of(passes, burst or NOTHING, kinds, self._lockstep_group)
        self.runner.context.shared_rows = None
        if chunks:
            self.runner.prefill(chunks, kinds)
        self._join(most.passes - passes)
        rows, others_steps = most.rows, most.steps - steps
        if self.runner.graphs is not None:
            rows = others_steps = 0
            burst, kinds = most.burst_of_all(running if burst else [], steps), most.kinds
        self.runner.context.shared_rows = rows
        if burst is not None:
            self.runner.decode(*burst, kinds)
        self._join(others_steps)
        return self._finish(running) if running else []

    def _join(self, passes: int) -> None:
        for _ in range(passes):
            for experts in self._expert_layers:
                experts.decode(self._nothing, self.runner.context)


def graphs_alike(runner: ModelRunner, slots: int, groups: ParallelGroups) -> bool:
    """Whether ranks that share experts have ``slots`` alike, as graphs need it; collective over the lockstep group."""
    found = max_over({"most": slots, "least": -slots}, groups.lockstep_group)
    alike = found["most"] == -found["least"]
    if runner.graphs is not None and not alike:
        logger.warning("decode runs eager: ranks that share experts have room for different numbers of sequences")
    return alike
