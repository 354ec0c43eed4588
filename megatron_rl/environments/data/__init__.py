"""The base of environments that read a data set: a subclass says what a row means and how it is graded.

``rows`` reads a source and checks every row, ``layouts`` says which columns it may have. Nothing here imports
``datasets`` or ``pyarrow`` before rows are read: they take seconds.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from megatron_rl.environments.base import Environment
from megatron_rl.environments.checks import MAX_ROWS, TooMuch
from megatron_rl.environments.data.layouts import AFTER, BEFORE
from megatron_rl.environments.data.rows import Row, RowError, Source, read_rows
from megatron_rl.environments.grading import GRADERS, grade
from megatron_rl.environments.grading.text import END_OF_THOUGHT
from megatron_rl.environments.results import is_right, judge
from megatron_rl.errors import ConfigError
from megatron_rl.types import Grade, LaterTurn, Message, Prompt, Split, Task, Transcript

__all__ = ["AFTER", "BEFORE", "DatasetEnvironment", "Overlong", "Problem", "Row", "RowError", "Source", "chosen"]
__all__ += ["dapo_prompt", "held_out", "letters_and_digits", "read_rows"]

STATUSES = ("correct", "no_answer", "unparsable", "timeout")
"""Verdicts of the graders that become metrics; what remains to 1 was an answer and wrong."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Problem:
    """One checked row."""

    statement: str
    """The bare problem: two rows with the same statement are the same problem, whatever surrounds it."""
    prompt: Prompt
    gold: str
    """The right answer as its grader wants it; kept as text, since a float would damage long integers."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """What the environment itself wants to find in ``Task.data`` besides ``gold``."""
    solution: str = ""
    """A worked solution, where the data set has one."""
    later: tuple[LaterTurn, ...] = ()
    """The rest of a conversation that is to be learnt."""
    number: int = 0
    """Of its row, from 1."""

    @property
    def task(self) -> Task:
        """The task of this problem; its id depends on the statement alone."""
        digest = hashlib.sha256(self.statement.encode()).hexdigest()[:16]
        return Task(digest, self.prompt, {**({"gold": self.gold} if self.gold else {}), **self.data})


def distinct(rows: Iterable[Problem], counts: Counter[str], most: int) -> dict[str, Problem]:
    """Return the problems by statement, each once; add to ``counts`` the rows, and how many were dropped and why.

    It reads no further once there are more than ``most``.

    Of a problem with two answers no one can say which is right: all its rows are dropped.
    """
    kept: dict[str, Problem] = {}
    contradictory: set[str] = set()
    repeated: Counter[str] = Counter()
    for problem in rows:
        counts["rows"] += 1
        earlier = kept.setdefault(problem.statement, problem)
        repeated[problem.statement] += earlier is not problem
        if earlier.gold != problem.gold:
            contradictory.add(problem.statement)
        if len(kept) - len(contradictory) > most:
            break
    for statement in contradictory:
        del kept[statement]
        counts["with two answers"] += 1 + repeated.pop(statement)
    counts["repeated"] += repeated.total()
    return kept


def held_out(statement: str, one_in: int) -> bool:
    """Return whether a problem is in the ``one_in``-th part kept for the test split; never with ``one_in`` 0.

    It is by a hash of its letters and digits, whatever file or order it comes in and however its spaces are.
    """
    digest = hashlib.sha256(letters_and_digits(statement).encode()).digest()
    return one_in > 0 and int.from_bytes(digest[:8]) % one_in == 0


def letters_and_digits(text: str) -> str:
    """Return what copies of one problem have in common; spaces and dollar signs differ."""
    return re.sub(r"[\W_]", "", text).lower()


@dataclass(frozen=True)
class Overlong:
    """DAPO's soft overlong punishment; ``buffer`` is L_cache and ``max_tokens`` L_max, both in tokens."""

    buffer: int
    factor: float
    max_tokens: int

    def __post_init__(self) -> None:
        if self.buffer and not 0 < self.buffer <= self.max_tokens:
            raise ValueError(
                f"overlong_buffer is {self.buffer} and max_response_tokens {self.max_tokens}; give the limit of "
                "--rl-max-new-tokens as max_response_tokens, and a buffer from 1 to it, or 0 for none"
            )
        if not 0 < self.factor < math.inf:
            raise ValueError(f"overlong_penalty is {self.factor}; it must be positive: it is what gets subtracted")

    @property
    def free_tokens(self) -> int:
        """The longest completion that costs nothing; 0 without a buffer."""
        return self.max_tokens - self.buffer if self.buffer else 0

    def penalty(self, num_tokens: int) -> float:
        """Return DAPO's equation 13: 0 up to ``max_tokens - buffer``, then linear to ``-factor``.

        Of 16384 and a buffer of 4096: 12288 tokens cost 0, 14336 half the factor, 16384 and more all of it.
        """
        exceeded = num_tokens - (self.max_tokens - self.buffer)
        return 0.0 - min(max(exceeded / self.buffer, 0.0), 1.0) * self.factor


class DatasetEnvironment(Environment):
    """Tasks are the rows of ``source``; ``grader`` compares a completion with ``Problem.gold``.

    ``path`` is a local file that is read instead of the hub. ``format_reward`` is added to the lowest reward
    when the completion has an answer that is wrong. With ``thinking`` an answer counts only after ``</think>``,
    whether the model or the chat template began the thought. With ``overlong_buffer`` above 0 the last so many of
    ``max_response_tokens`` are punished: 0 before them, ``-overlong_penalty`` at the end, as in DAPO.
    """

    source: ClassVar[Source]
    grader: str = "math"
    """A file of ``megatron_rl.environments.grading``."""
    held_out: int = 0
    """One problem in so many belongs to the test split."""
    skips_bad_rows: ClassVar[bool] = False
    """Whether rows that cannot be read are counted and left out; else they are errors."""

    def __init__(
        self,
        *,
        path: str = "",
        format_reward: float = 0.0,
        thinking: bool = False,
        overlong_buffer: int = 0,
        overlong_penalty: float = 1.0,
        max_response_tokens: int = 0,
    ) -> None:
        lowest, highest = self.reward_range
        room = math.inf if highest is None else highest - lowest
        if not 0 <= format_reward < room:
            raise ValueError(f"format_reward is {format_reward}; it must be at least 0 and below {room:g}")
        self._path = path
        self._format_reward = format_reward
        self._thinking = thinking
        self.overlong = Overlong(overlong_buffer, overlong_penalty, max_response_tokens)
        if overlong_buffer and type(self).evaluation_only:
            raise ValueError(f"overlong_buffer is for training, and {self.name} is only evaluated; leave it out")
        self._loaded: dict[Source, tuple[Problem, ...]] = {}

    def parse(self, row: Row) -> Problem:
        """Return the problem in a row, or raise ``RowError``; every row is parsed before any is used."""
        statement, chat = row.problem()
        return Problem(statement, chat or self.prompt(statement), row.answer())

    def numbered(self, row: Row) -> Problem:
        """Parse a row and note its number."""
        return replace(self.parse(row), number=row.number)

    def prompt(self, statement: str) -> Prompt:
        """Return what asks for a problem that is published without a prompt."""
        return dapo_prompt(statement)

    def reject(self, problem: Problem) -> str:
        """Return why a problem cannot be used, in words after a number (``with damaged answers``); "" if it can."""
        return ""

    def problems(self, split: Split) -> Sequence[Problem]:
        """Return the problems of a split: the rows of one source, some of them held out."""
        rows = self.load(replace(self.source, path=self._path))
        if type(self).evaluation_only:
            return rows
        return [row for row in rows if held_out(row.statement, self.held_out) == (split == "test")]

    def load(self, source: Source) -> tuple[Problem, ...]:
        """Return the usable problems of a source, read once; log what was dropped, and why."""
        if source not in self._loaded:
            counts: Counter[str] = Counter()
            bad: list[str] = []
            most = 2 * MAX_ROWS if self.held_out else MAX_ROWS
            rows = read_rows(source, self.numbered, bad.append if self.skips_bad_rows else None)
            kept = distinct(rows, counts, most)
            if len(kept) > most:  # it would be refused when all of it is read, which takes minutes
                raise TooMuch([f"{source.where} has more than {most:,} different problems; give fewer"])
            counts["that cannot be read"] = len(bad)
            for statement, problem in list(kept.items()):
                if reason := self.reject(problem):
                    counts[reason] += 1
                    del kept[statement]
            total = counts.pop("rows", 0) + len(bad)
            dropped = ", ".join(f"{count} {reason}" for reason, count in counts.items() if count) or "nothing"
            dropped += f"; the first of these: {bad[0]}" if bad else ""
            if not kept:
                raise ConfigError([f"{source.where} has no usable row; dropped of {total} rows: {dropped}"])
            logger.info("%s: %d problems of %s; dropped: %s", self.name, len(kept), source.where, dropped)
            self._loaded[source] = tuple(kept.values())
        return self._loaded[source]

    def tasks(self, split: Split) -> Iterator[Task]:
        """Return the problems of a split in the order of the data set."""
        if split == "train" and type(self).evaluation_only:
            why = "cannot be trained on, because models are measured by it; set evaluation_only: true"
            raise ConfigError([f"{self.name} {why}"])
        return (problem.task for problem in self.problems(split))

    def grade(self, task: Task, transcript: Transcript) -> Grade:
        """Give the highest reward to a right answer, else the lowest, less what its length costs; verdicts as metrics.

        Neither the format reward nor the length changes what is right.
        """
        verdict = grade(self.grader, self.answer_in(transcript), task.data["gold"])
        lowest, highest = self.reward_range
        rewards = {"correct": highest, "wrong": lowest + self._format_reward, "partial": verdict.reward}
        metrics = {**verdict.metrics, **{name: float(verdict.status == name) for name in STATUSES}}
        graded = replace(verdict, reward=rewards.get(verdict.status, lowest), metrics=metrics)
        return self.less_length(graded, transcript)

    def less_length(self, grade: Grade, transcript: Transcript) -> Grade:
        """Subtract what the length costs, which makes no right answer wrong."""
        if not self.overlong.buffer:
            return grade
        penalty = self.overlong.penalty(transcript.num_tokens)
        metrics = {**grade.metrics, "overlong_penalty": penalty}
        correct = is_right(grade, self.reward_range)
        return replace(grade, reward=grade.reward + penalty, metrics=metrics, correct=correct)

    def answer_in(self, transcript: Transcript) -> str:
        """Return what is graded: the completion, with ``thinking`` from the end of the thought on, or nothing."""
        if not self._thinking:
            return transcript.text
        _, end, answer = transcript.text.rpartition(END_OF_THOUGHT)
        return end + answer if end else ""

    def gold_answer(self, task: Task) -> str | None:
        """Return the answer as its grader wants it written."""
        form = vars(GRADERS.module(self.grader)).get("FORM")
        return self.before_answer + form % task.data["gold"] if form and "gold" in task.data else None

    def finds_right(self, task: Task, completion: str) -> bool:
        """Return whether the completion is graded as a right answer."""
        return judge(self, (task, Transcript(completion, "stop", 0))).correct is True

    @property
    def before_answer(self) -> str:
        """Return what a model has to write before its answer counts."""
        return END_OF_THOUGHT if self._thinking else ""


def chosen(option: str, value: object, allowed: Sequence[object]) -> None:
    """Raise ``ValueError`` unless an option has one of the values ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{option} is {value!r}; use {' or '.join(map(str, allowed))}")


def dapo_prompt(statement: str) -> tuple[Message, ...]:
    """Return the chat that asks for a problem."""
    return ({"role": "user", "content": f"{BEFORE}{statement}{AFTER}"},)
