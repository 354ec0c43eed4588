"""Expected lengths: how many tokens a group will probably take, from what was seen of its task.

Groups are dealt to the rollout replicas by it before they are generated. All ranks learn the same numbers in the
same order, so all deal alike; the state is in the checkpoint, so a resumed run does, too. Which rank generates a group
does not change its tokens: a wrong estimate costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_rl.trainer.packing import balance
from megatron_rl.types import Request, SourcedTask

_GROUPS_IN_MEAN = 256
"""An environment's mean is over about its last so many groups: it follows a policy whose answers grow."""
_TASKS_KEPT = 20_000
"""Of each environment, about 0.5 MB of JSON. Tasks come round by epochs, so a table that made room for the newest
task would always lose the one that is drawn next: when it is full, new tasks are not taken in."""


@dataclass
class _Environment:
    """What was seen of one environment; lengths are tokens of a completion."""

    mean: float = 0.0
    groups: int = 0
    tasks: dict[str, float] = field(default_factory=dict)
    """Mean over the samples of each task when it was last seen."""


class ExpectedLengths:
    """Learns how long completions become: by task, else by environment, else it expects the limit."""

    def __init__(self) -> None:
        self._environments: dict[str, _Environment] = {}

    def tokens(self, request: Request) -> int:
        """Tokens of a group: its prompt, which is read once, and what its completions will probably add."""
        begun = sum(len(sample.token_ids) for sample in request.begun)
        return len(request.prompt_ids) + max(0, round(request.num_samples * self.completion(request)) - begun)

    def learn(self, seen: Iterable[tuple[SourcedTask, float]]) -> None:
        """Take in tasks and the mean lengths of their completions, in an order that all ranks share.

        The length of a conversation is that of all its turns and of what the model read between them; that of a sample
        of several sequences is theirs together, without what a branch's prompt repeats.
        """
        for source, length in seen:
            known = self._environments.setdefault(source.environment, _Environment())
            known.groups += 1
            known.mean += (length - known.mean) / min(known.groups, _GROUPS_IN_MEAN)
            if source.task.id in known.tasks or len(known.tasks) < _TASKS_KEPT:
                known.tasks[source.task.id] = round(length, 1)

    def state_dict(self) -> dict[str, Any]:
        """JSON values, for a checkpoint."""
        return {name: asdict(known) for name, known in self._environments.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; of a checkpoint without one: begin anew."""
        self._environments = {
            name: _Environment(known["mean"], known["groups"], dict(known["tasks"])) for name, known in state.items()
        }

    def completion(self, request: Request) -> float:
        """Tokens of one of its completions."""
        known = self._environments.get(request.source.environment)
        if known is None:
            return request.sampling.max_new_tokens
        return known.tasks.get(request.source.task.id, known.mean)


def deal(requests: Sequence[Request], expected: ExpectedLengths, num_ranks: int) -> list[int]:
    """The rollout replica of each group, with about the same expected tokens on all ranks: longest first.

    Of groups that are expected to be alike every rank gets some of each environment: environments are drawn by
    turns, and two ranks that took the groups by turns would have one each. Every rank gets a group if there are enough.
    """
    order = sorted(range(len(requests)), key=lambda index: requests[index].source.environment)
    ranks = balance([expected.tokens(requests[index]) for index in order], num_ranks)
    return [rank for _, rank in sorted(zip(order, ranks, strict=True))]
