"""Graders: text in, reward and reason out.

A file here that defines ``judge(completion, gold) -> Grade`` and ``REWARDS``, the lowest and the highest, is a kind;
``FORM % gold`` is a right answer as it wants it written. One that runs code says ``NEEDS_SANDBOX = True``, and how many
seconds a grade may take as ``DEADLINE``; ``PRELOAD`` names modules whose import is slow.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_rl.environments.grading.expressions import arithmetic_value
from megatron_rl.registry import Registry
from megatron_rl.types import Grade

__all__ = ["GRADERS", "Grader", "arithmetic_value", "grade", "needs_sandbox", "reward_range", "stated_deadline"]

Grader = Callable[[str, str], Grade]
"""From completion and gold answer."""
GRADERS: Registry[Grader] = Registry("grader", "megatron_rl.environments.grading", "judge")


def grade(kind: str, completion: str, gold: str) -> Grade:
    """Return the verdict of the grader ``kind``; outside the main thread the time of ``math`` has no bound.

    Raises:
        ConfigError: there is no such kind.
        ValueError: it cannot read the gold answer.
    """
    return GRADERS.get(kind)(completion, gold)


def reward_range(reference: str) -> tuple[float, float | None]:
    """Return the rewards of an empty answer and of a perfect one: ``REWARDS`` of its file, or 0 and 1.

    The highest is None where the file says that there is none.
    """
    stated = vars(GRADERS.module(reference)).get("REWARDS", (0.0, 1.0))
    lowest, highest = stated if isinstance(stated, tuple | list) and len(stated) == 2 else (None, None)
    if not _is_finite(lowest) or (highest is not None and not (_is_finite(highest) and lowest < highest)):
        instead = "write (lowest, highest), or (lowest, None) where no reward is the highest"
        raise ValueError(f"REWARDS beside reward {reference} is {stated!r:.60}; {instead}")
    return float(lowest), None if highest is None else float(highest)


def _is_finite(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < float("inf")


def needs_sandbox(reference: str) -> bool:
    """Return whether the file of the grader or function says that it runs what a model wrote."""
    return vars(GRADERS.module(reference)).get("NEEDS_SANDBOX", False) is True


def stated_deadline(reference: str) -> float | None:
    """Return the seconds that a grade may take, where the file of the grader or function states them."""
    return vars(GRADERS.module(reference)).get("DEADLINE")
