"""Twelve kinds of rewards that are no rewards, as an environment returns them and as a forged answer carries them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from megatron_rl.environments.base import Environment
from megatron_rl.types import Grade, Split, Task, Transcript

KINDS: dict[str, object] = {
    "nan": float("nan"),
    "plus_infinity": float("inf"),
    "minus_infinity": -float("inf"),
    "none": None,
    "text": "1.0",
    "truth_value": True,
    "list": [1.0],
    "mapping": {"reward": 1},
    "complex": 1 + 0j,
    "huge_integer": 10**400,
    "bytes": b"1.0",
    "numpy_nan": numpy.float32("nan"),
}


@dataclass(frozen=True)
class Forged:
    """One item of a grade answer, as text: what JSON cannot carry is replaced by the nearest lie that it can."""

    item: str
    code: str = "invalid_reward"
    spoils_the_answer: bool = False
    """The text is no JSON, or no answer: the other samples of the request have no grade either."""


def _reward(text: str, **options: Any) -> Forged:
    return Forged(f'{{"status": "ok", "reward": {text}, "metrics": {{}}}}', **options)


UNREADABLE: dict[str, Any] = {"code": "environment_exception", "spoils_the_answer": True}
FORGED: dict[str, Forged] = {
    "nan": _reward("NaN", **UNREADABLE),  # Python's spelling, which is not JSON
    "plus_infinity": _reward("1e999"),  # JSON by its grammar, and infinite once it is read
    "minus_infinity": _reward("-Infinity", **UNREADABLE),
    "none": _reward("null"),
    "text": _reward('"1.0"'),
    "truth_value": _reward("true"),
    "list": _reward("[1.0]"),
    "mapping": _reward('{"reward": 1}'),
    "complex": Forged('{"status": "ok", "metrics": {}}'),  # no reward at all
    "huge_integer": _reward("1" + "0" * 400),
    # "ok" with a reward first, then "error" without a code: the last one counts, and is incomplete
    "bytes": Forged('{"status": "ok", "reward": 1.0, "status": "error"}', **UNREADABLE),
    "numpy_nan": _reward('"nan"'),
}


class BadRewards(Environment):
    """Returns the kind of reward that the task names, in the place it names; a good one where it names none."""

    name = "bad_rewards"

    def tasks(self, split: Split) -> Iterator[Task]:
        """One that is good."""
        yield Task(split, "p", {"reward": 1.0})

    def grade(self, task: Task, transcript: Transcript) -> float | Grade:
        """The reward plainly, or in a ``Grade``."""
        if "kind" not in task.data:
            return task.data["reward"]
        value = KINDS[task.data["kind"]]
        return Grade(value) if task.data["place"] == "Grade" else value


def forged_answer(forged: Forged | None, rewards: Sequence[float | None]) -> str:
    """An answer with one item a reward; None stands where the forged one goes."""
    items = [forged.item if r is None else json.dumps({"status": "ok", "reward": r, "metrics": {}}) for r in rewards]
    return f'{{"items": [{", ".join(items)}]}}'
