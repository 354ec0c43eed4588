"""Problems as they come out of a data set's rows, and the rows that cannot be kept."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.types import Prompt, Task


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

    @property
    def task(self) -> Task:
        """The task of this problem; its id depends on the statement alone."""
        digest = hashlib.sha256(self.statement.encode()).hexdigest()[:16]
        return Task(digest, self.prompt, {"gold": self.gold, **self.data})


def distinct(rows: Iterable[Problem], counts: Counter[str]) -> dict[str, Problem]:
    """The problems by statement, each once; ``counts`` is told of the rows, what was dropped and why.

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
    for statement in contradictory:
        del kept[statement]
        counts["with two answers"] += 1 + repeated.pop(statement)
    counts["repeated"] += repeated.total()
    return kept


def held_out(statement: str, one_in: int) -> bool:
    """Whether a problem is in the ``one_in``-th part kept for the test split; never with ``one_in`` 0.

    By a hash of its letters and digits: it stays there whatever file or order it comes in, and a copy that
    differs in spaces alone stays with it.
    """
    digest = hashlib.sha256(letters_and_digits(statement).encode()).digest()
    return one_in > 0 and int.from_bytes(digest[:8]) % one_in == 0


def letters_and_digits(text: str) -> str:
    """What copies of one problem have in common; spaces and dollar signs differ."""
    return re.sub(r"[\W_]", "", text).lower()
