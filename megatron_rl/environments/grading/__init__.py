"""Graders: text in, reward and reason out.

A file here that defines ``judge(completion, gold) -> Grade`` and ``REWARDS``, the lowest and the highest, is a kind;
``FORM % gold`` is a right answer as it wants it written. One that runs code says ``NEEDS_SANDBOX = True``, and how many
seconds a grade may take as ``DEADLINE``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from megatron_rl.environments.grading.expressions import arithmetic_value
from megatron_rl.registry import GRADERS
from megatron_rl.types import Grade

__all__ = ["Grader", "RewardFunction", "arithmetic_value", "grade", "needs_sandbox", "reward_function", "reward_range"]
__all__ += ["stated_deadline"]

Grader = Callable[[str, str], Grade]
"""From completion and gold answer."""
RewardFunction = Callable[[str, Mapping[str, Any]], float | Grade]
"""A user's own, from completion and row of the data set."""


def grade(kind: str, completion: str, gold: str) -> Grade:
    """The verdict of the grader ``kind`` on ``completion``, from any thread.

    ``math`` may take long and cannot be interrupted, so it belongs into a worker (which is where environments are
    graded). ``ConfigError`` for an unknown kind, ``ValueError`` for a gold answer that the kind cannot read.
    """
    return GRADERS.get(kind)(completion, gold)


def reward_function(reference: str) -> RewardFunction:
    """The function ``file.py:function`` or ``package.module:function``.

    Raises:
        ConfigError: it is not there or cannot be imported.
        ValueError: it cannot be called with a completion and a row.
    """
    function = GRADERS.get(reference)
    try:
        inspect.signature(function).bind("", {})
    except (TypeError, ValueError) as error:
        raise ValueError(f"reward {reference} cannot be called as function(completion, row): {error}") from error
    return function


def reward_range(reference: str) -> tuple[float, float | None]:
    """The rewards of an empty answer and of a perfect one: ``REWARDS`` of the file that has it, or 0 and 1. The highest
    is None where the file says so: there is none."""
    stated = vars(GRADERS.module(reference)).get("REWARDS", (0.0, 1.0))
    two = isinstance(stated, tuple | list) and len(stated) == 2
    bounds = [bound for bound in stated if bound is not None] if two else []
    numbers = bool(bounds) and stated[0] is not None and all(type(bound) in (int, float) for bound in bounds)
    if not numbers or not float("-inf") < bounds[0] < bounds[-1] + (len(bounds) < 2) < float("inf"):
        instead = "write (lowest, highest), or (lowest, None) where no reward is the highest"
        raise ValueError(f"REWARDS beside reward {reference} is {stated!r:.60}; {instead}")
    return float(stated[0]), None if stated[1] is None else float(stated[1])


def needs_sandbox(reference: str) -> bool:
    """Whether the file of the grader or function says that it runs what a model wrote."""
    return vars(GRADERS.module(reference)).get("NEEDS_SANDBOX", False) is True


def stated_deadline(reference: str) -> float | None:
    """Seconds that a grade may take, where the file of the grader or function says so."""
    return vars(GRADERS.module(reference)).get("DEADLINE")
