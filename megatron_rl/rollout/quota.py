"""How many groups a step still wants, agreed on by all replicas while each of them generates its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algorithms.extension import measure_of
from megatron_rl.platform.collectives import any_rank, broadcast_json
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.types import Grade, RolloutGroup

OPEN, IDLE, COUNTS = 0, 1, 2
"""A group that is not finished; one that is and does not count; one that counts."""
_LOOK_EVERY = 8
"""Engine steps between two looks where several ranks step together."""


class Quota:
    """Ends a rollout once ``wanted`` groups count: the first ones, in the order in which they were drawn.

    Whoever is done first does not win: that would prefer short answers, and which groups a step has would depend on
    the clock. So a step ends when all groups up to the last one needed are finished, and later ones are given up.

    Replicas do not wait for each other: the sum of what they know is on its way while they generate. The next one is
    begun when it has arrived, so all have seen the same sums in the same order, and all decide alike.
    """

    def __init__(self, wanted: int, numbers: range, counts: Callable[[Tensor], bool], groups: ParallelGroups) -> None:
        """``numbers`` are those of the groups that all replicas together generate; ``counts`` is a `GroupFilter`."""
        self._wanted = wanted
        self._numbers = numbers
        self._counts = counts
        self._groups = groups
        self._known: dict[int, int] = {}
        self._sum, self._work = torch.zeros(0), None
        self._steps = 0
        self.states: list[int] = []
        """Of each group, once `is_met`: the same on all ranks."""
        self.was_left = False
        """A replica has left, as it was asked to stop or ran out of memory; all must."""

    def is_met(self, finished: Mapping[int, RolloutGroup], idle: bool) -> bool:
        """Whether to generate no more; ``finished`` are this replica's groups. Collective among who steps together.

        ``idle`` says that nothing is left to generate or to grade here.
        """
        self._steps += 1
        alone = self._groups.lockstep_group.size() == 1
        if not (alone or idle or self._steps % _LOOK_EVERY == 0):
            return False
        leads = self._groups.leads_model
        if leads and not self._ended:
            self._exchange(finished)
        if alone:
            return self._ended
        if not any_rank(leads and self._ended, self._groups.lockstep_group):
            return False
        while leads and not self._ended:  # the sum that another copy has seen is on its way
            self._exchange(finished, waits=True)
        told = [self.states, self.was_left]
        self.states, self.was_left = broadcast_json(told, self._groups.model_leader(), self._groups.model_group)
        return True

    def leave(self) -> None:
        """This replica generates no more, whatever the others need: they hear of it, and stop."""
        while self._groups.leads_model and not self._ended:
            self._exchange({}, waits=True, leaves=True)

    @property
    def _ended(self) -> bool:
        return bool(self.states) or self.was_left

    def _exchange(self, finished: Mapping[int, RolloutGroup], waits: bool = False, leaves: bool = False) -> None:
        """Take in the sum that has arrived, or is waited for, and send the next one unless it has decided."""
        if self._work is not None and (waits or self._work.is_completed()):
            self._work.wait()
            self._work = None
            self._decide(*self._sum.split([len(self._numbers), 1]))
        if self._work is not None or self._ended:
            return
        own = [self._state(number, finished) for number in self._numbers]
        self._sum = torch.tensor([*own, int(leaves)])
        self._work = dist.all_reduce(self._sum, group=self._groups.rollout_group, async_op=True)

    def _decide(self, states: Tensor, left: Tensor) -> None:
        """Every group is one replica's, which adds its state; the others add 0."""
        self.was_left, known = bool(left), states.tolist()
        if not self.was_left and OPEN not in known[: self._needed(known)]:
            self.states = known

    @property
    def num_needed(self) -> int:
        """Of the first groups: those among which are all that were wanted; all of them where there are not enough."""
        return self._needed(self.states)

    def _needed(self, states: list[int]) -> int:
        places = [place for place, state in enumerate(states) if state == COUNTS]
        return places[self._wanted - 1] + 1 if len(places) >= self._wanted else len(states)

    def _state(self, number: int, finished: Mapping[int, RolloutGroup]) -> int:
        if number not in finished:
            return OPEN
        if number not in self._known:
            self._known[number] = COUNTS if counts_in(self._counts, finished[number]) else IDLE
        return self._known[number]


def counts_in(counts: Callable[[Tensor], bool], group: RolloutGroup) -> bool:
    """What the `GroupFilter` ``counts`` says of a group: of its rewards, or of its verdicts where all have one."""
    verdicts = [grade.correct for grade in _grades(group)]
    if measure_of(counts) == "rewards" or None in verdicts:
        return counts(graded_rewards(group))
    return counts(torch.tensor(verdicts, dtype=torch.float32))


def graded_rewards(group: RolloutGroup) -> Tensor:
    """Of those samples that have a grade."""
    return torch.tensor([grade.reward for grade in _grades(group)])


def _grades(group: RolloutGroup) -> list[Grade]:
    return [rollout.grade for rollout in group.rollouts if not rollout.grade.failed]
