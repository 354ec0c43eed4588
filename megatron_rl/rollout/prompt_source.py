"""Which task comes next, how it is asked, and which replica generates its answers.

`PromptSource` draws tasks without replacement, weighted over environments; `RequestFactory` makes requests of them.
`ExpectedLengths` says how many tokens a group will probably take, and `deal` gives each replica about as many. All
ranks learn the same numbers in the same order, so all deal alike; the state is in the checkpoint, so a resumed run
does, too. Which rank generates a group does not change its tokens: a wrong estimate costs time and nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megatron_rl.chat import unless_refused
from megatron_rl.errors import ConfigError, EnvironmentFault
from megatron_rl.trainer.packing import balance
from megatron_rl.types import Completion, Hints, Request, SamplingParams, SourcedTask, Task

_GROUPS_IN_MEAN = 256
"""An environment's mean is over about its last so many groups: it follows a policy whose answers grow."""
_TASKS_KEPT = 20_000
"""Of each environment, about 0.5 MB of JSON. Tasks come round by epochs, so a table that made room for the newest
task would always lose the one that is drawn next: when it is full, new tasks are not taken in."""
Position = tuple[dict[str, int], dict[str, int], dict[str, int], int]


@dataclass(frozen=True)
class TaskPool:
    """The training tasks of one environment and its share of the draws."""

    environment: str
    tasks: Sequence[Task]
    weight: float


class PromptSource:
    """Draws tasks; its whole state is one integer per environment: how many it has drawn.

    Each epoch of an environment is a permutation seeded by (seed, environment, epoch), so the
    cursor is the count and every rank that runs the same source draws the same tasks. The
    environment of a draw is the one furthest behind its share, as if the list had been the same all
    along: one that is added at a resume gets its share from there on, and does not catch up.
    """

    def __init__(
        self, pools: Sequence[TaskPool], encode: Callable[[Task, str], Sequence[int]], max_prompt_tokens: int, seed: int
    ) -> None:
        """``encode`` gives the prompt of a task of an environment in tokens."""
        self._pools = [pool for pool in pools if pool.weight > 0]
        empty = [pool.environment for pool in self._pools if not pool.tasks]
        if empty:
            raise ConfigError([f"environment {name!r} has no training tasks" for name in empty])
        self._encode = encode
        self._max_prompt_tokens = max_prompt_tokens
        self._seed = seed
        self._drawn = {pool.environment: 0 for pool in self._pools}
        self._shares = dict(self._drawn)
        """What each would have drawn of as many draws with this list and these weights from the start."""
        self._order: dict[str, tuple[int, list[int]]] = {}
        self._by_id: dict[str, dict[str, Task]] = {}
        self._misses = {pool.environment: 0 for pool in self._pools}
        self._refused: dict[str, str] = {}
        self.skipped = 0
        """Prompts that are too long, or that the chat template refuses."""

    def draw(self, count: int) -> list[SourcedTask]:
        """Draw the next ``count`` tasks whose prompts fit; longer ones, and those refused, are skipped and counted.

        Raises:
            EnvironmentFault: an environment has no prompt that fits.
        """
        drawn: list[SourcedTask] = []
        while len(drawn) < count:
            pool = self._next_pool()
            source = self._take(pool)
            if 0 < len(source.prompt_ids) <= self._max_prompt_tokens:
                drawn.append(source)
                self._misses[pool.environment] = 0
            else:
                self._skip(pool)
        return drawn

    def find(self, environment: str, task_id: str, epoch: int) -> SourcedTask | None:
        """Return a task as it was drawn before; None where the environment or the task is not there any more."""
        if environment not in self._by_id:
            tasks = [pool.tasks for pool in self._pools if pool.environment == environment]
            self._by_id[environment] = {task.id: task for part in tasks for task in part}
        task = self._by_id[environment].get(task_id)
        return None if task is None else self._sourced(environment, task, epoch)

    def state_dict(self) -> dict[str, int]:
        """Return the cursor, for a checkpoint."""
        return dict(self._drawn)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where `state_dict` was taken; environments new to the run start at 0."""
        self._drawn = {name: int(state.get(name, 0)) for name in self._drawn}
        self._shares = dict.fromkeys(self._drawn, 0)
        for _ in range(sum(self._drawn.values())):  # 2 s for a million
            self._next_pool()

    def position(self) -> Position:
        """Return where it stands, for `return_to`: what `load_state_dict` would have to work out again."""
        return dict(self._drawn), dict(self._shares), dict(self._misses), self.skipped

    def return_to(self, position: Position) -> None:
        """Draw again what was drawn since ``position``."""
        drawn, shares, misses, self.skipped = position
        self._drawn, self._shares, self._misses = dict(drawn), dict(shares), dict(misses)

    def _skip(self, pool: TaskPool) -> None:
        """Count a miss by environment: beside a healthy one, one without a fitting prompt would go unnoticed."""
        self.skipped += 1
        self._misses[pool.environment] += 1
        if self._misses[pool.environment] >= 2 * len(pool.tasks):  # a whole epoch is among them
            raise EnvironmentFault(
                f"no prompt of {pool.environment!r} fits in {self._max_prompt_tokens} tokens; "
                "raise --inference-max-seq-length or lower --rl-max-new-tokens"
                + self._refused.get(pool.environment, "")
            )

    def _next_pool(self) -> TaskPool:
        """Choose and count the pool that is furthest below its share of all draws."""
        total = sum(self._shares.values()) + 1
        weights = sum(pool.weight for pool in self._pools)
        chosen = max(self._pools, key=lambda pool: total * pool.weight / weights - self._shares[pool.environment])
        self._shares[chosen.environment] += 1
        return chosen

    def _take(self, pool: TaskPool) -> SourcedTask:
        drawn = self._drawn[pool.environment]
        epoch, index = divmod(drawn, len(pool.tasks))
        self._drawn[pool.environment] = drawn + 1
        known_epoch, order = self._order.get(pool.environment, (-1, []))
        if known_epoch != epoch:
            order = list(range(len(pool.tasks)))
            random.Random(f"{self._seed}/{pool.environment}/{epoch}").shuffle(order)
            self._order[pool.environment] = (epoch, order)
        return self._sourced(pool.environment, pool.tasks[order[index]], epoch)

    def _sourced(self, environment: str, task: Task, epoch: int) -> SourcedTask:
        """With the prompt in tokens, none where the chat template refuses it."""
        ids = unless_refused(lambda: self._encode(task, environment), self._refused, environment)
        return SourcedTask(environment, task, epoch, tuple(ids or ()))


@dataclass(frozen=True)
class RequestFactory:
    """Knows how answers are drawn and how long a sequence may become."""

    sampling: SamplingParams
    max_sequence_length: int
    wants_routing: bool = False
    """See `Hints`."""

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that leaves room for a full answer.

        When answers may fill the whole sequence, a prompt needs only leave room for one token.
        """
        if self.sampling.max_new_tokens >= self.max_sequence_length - 1:
            return self.max_sequence_length - 1
        return self.max_sequence_length - self.sampling.max_new_tokens

    def request(
        self, source: SourcedTask, num_samples: int, index: int, greedy: bool = False, at_most: int | None = None
    ) -> Request:
        """Ask for one group; ``index`` is its number in the step, ``at_most`` bounds its new tokens further."""
        room = self.max_sequence_length - len(source.prompt_ids)
        tokens = min(self.sampling.max_new_tokens, room, at_most or room)
        sampling = replace(self.sampling, greedy=greedy, max_new_tokens=tokens)
        hints = Hints(wants_routing=self.wants_routing)
        return Request(source, source.prompt_ids, num_samples, sampling, index, hints=hints)


@dataclass
class _Environment:
    """What was seen of one environment; lengths are tokens of a completion."""

    mean: float = 0.0
    groups: int = 0
    tasks: dict[str, float] = field(default_factory=dict)
    """Mean over the samples of each task when it was last seen."""


def drawn_for(request: Request) -> tuple[Completion, ...]:
    """Return all completions that a request has so far, those of a harness call by call."""
    calls = (answer for talk in request.talks for answer in (talk.calls or {}).values())
    branches = (branch.completion for talk in request.talks if talk.ended for branch in talk.ended.branches)
    return (*request.so_far, *calls, *branches)


class ExpectedLengths:
    """Learns how long completions become: by task, else by environment, else it expects the limit."""

    def __init__(self) -> None:
        self._environments: dict[str, _Environment] = {}

    def tokens(self, request: Request) -> int:
        """Expect the tokens of a group: its prompt, which is read once, and what its completions will add."""
        drawn = sum(len(sample.token_ids) for sample in drawn_for(request))
        return len(request.prompt_ids) + max(0, round(request.num_samples * self.completion(request)) - drawn)

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
        """Return JSON values, for a checkpoint."""
        return {name: asdict(known) for name, known in self._environments.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; of a checkpoint without one: begin anew."""
        self._environments = {
            name: _Environment(known["mean"], known["groups"], dict(known["tasks"])) for name, known in state.items()
        }

    def completion(self, request: Request) -> float:
        """Expect the tokens of one of its completions."""
        known = self._environments.get(request.source.environment)
        if known is None:
            return request.sampling.max_new_tokens
        return known.tasks.get(request.source.task.id, known.mean)


def deal(requests: Sequence[Request], expected: ExpectedLengths, num_ranks: int) -> list[int]:
    """Return the rollout replica of each group, with about the same expected tokens on all: longest first.

    Of groups that are expected to be alike every rank gets some of each environment: environments are drawn by
    turns, and two ranks that took the groups by turns would have one each. Every rank gets a group if there are enough.
    """
    order = sorted(range(len(requests)), key=lambda index: requests[index].source.environment)
    ranks = balance([expected.tokens(requests[index]) for index in order], num_ranks)
    return [rank for _, rank in sorted(zip(order, ranks, strict=True))]
