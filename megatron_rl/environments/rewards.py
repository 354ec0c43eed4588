"""What ``reward`` of a data set may be: a grader, a function of your own or of TRL's signature, several with weights.

Each becomes a `Reward`, called with the completion and its task.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from megatron_rl.environments.grading import GRADERS, grade, reward_range
from megatron_rl.environments.results import checked_grade, is_right
from megatron_rl.errors import shorten
from megatron_rl.types import Grade, Task

Reward = Callable[[str, Task], float | Grade]
"""From the completion and its task, whose data has the columns as ``row`` and the right answer as ``gold``."""
_NOT_HERE = ("completion_ids", "trainer_state")
"""What TRL gives a reward beside prompts, completions and columns, and nobody knows where answers are graded."""


class NotApplicableError(Exception):
    """A function of TRL's signature returned None for this sample. Alone it masks the sample, like any error."""


def reward_of(reference: str) -> Reward:
    """Return the reward of a grader's name, or of ``file.py:function``.

    A function with a parameter ``completions`` has TRL's signature ``(completions, **columns) -> list[float]`` and is
    called for one completion at a time; any other is called as ``function(completion, row)``.

    Raises:
        ConfigError: it is not there or cannot be imported.
        ValueError: it cannot be called in either way.
    """
    if ":" not in reference:
        GRADERS.get(reference)
        return lambda completion, task: grade(reference, completion, task.data["gold"])
    function = GRADERS.get(reference)
    try:
        signature = inspect.signature(function)
        if "completions" in signature.parameters:
            return _of_trl(reference, function, signature)
        signature.bind("", {})
    except (TypeError, ValueError) as error:
        raise ValueError(f"reward {reference} cannot be called as function(completion, row): {error}") from error
    return lambda completion, task: function(completion, task.data["row"])


def _of_trl(reference: str, function: Callable[..., Any], signature: inspect.Signature) -> Reward:
    wanted = {name for name, each in signature.parameters.items() if each.kind != inspect.Parameter.VAR_KEYWORD}
    takes_all = len(wanted) < len(signature.parameters)
    if inspect.iscoroutinefunction(function) or wanted & set(_NOT_HERE):
        raise ValueError(f"it is async, or asks for {' or '.join(_NOT_HERE)}, which only TRL's trainer has")

    def reward(completion: str, task: Task) -> float | Grade:
        is_chat = not isinstance(task.prompt, str)
        columns = {name: [value] for name, value in task.data["row"].items()}
        columns["prompts"] = [[dict(message) for message in task.prompt] if is_chat else task.prompt]
        columns["completions"] = [[{"role": "assistant", "content": completion}] if is_chat else completion]
        given = columns if takes_all else {name: value for name, value in columns.items() if name in wanted}
        returned = function(**given)
        try:
            [value] = returned  # also of an array or a tensor
            number = value if isinstance(value, Grade | None) else float(value + 0.0)  # of a text it is a TypeError
        except (TypeError, ValueError):
            what = f"{reference} returned {shorten(returned)} for one completion, not a list of one number"
            raise TypeError(what) from None
        if number is None:
            raise NotApplicableError(f"{reference} returned None: it does not apply to this sample")
        return number

    return reward


def weighted(weights: Mapping[str, float]) -> tuple[Reward, tuple[float, float | None]]:
    """Return the sum of rewards times their weights, and its lowest and highest value.

    Each reward is also a metric of the grade, named like its grader or function. The first one says what is right.
    Those that do not apply to a sample are left out; a sample to which none applies is masked.

    Raises:
        ConfigError: one is not there.
        ValueError: a weight is no number, or two rewards have one name.
    """
    names = [reference.rpartition(":")[2] for reference in weights]
    if wrong := [name for name, weight in weights.items() if type(weight) not in (int, float) or weight <= 0]:
        raise ValueError(f"the weight of reward {wrong[0]} is {weights[wrong[0]]!r}; it must be a number above 0")
    if len(set(names)) < len(names):
        raise ValueError(f"two rewards are called {' and '.join(names)}; name each once")
    parts = [(name, weight, reward_of(each)) for name, (each, weight) in zip(names, weights.items(), strict=True)]
    ranges = [reward_range(each) for each in weights]
    lowest = sum(weight * low for (low, _), weight in zip(ranges, weights.values(), strict=True))
    tops = [None if high is None else weight * high for (_, high), weight in zip(ranges, weights.values(), strict=True)]

    def reward(completion: str, task: Task) -> Grade:
        grades: dict[str, Grade] = {}
        for name, _, part in parts:
            with contextlib.suppress(NotApplicableError):
                grades[name] = checked_grade(part(completion, task))
        if not grades:
            raise NotApplicableError(f"{' and '.join(names)} returned None: no reward applies to this sample")
        if fault := next((each for each in grades.values() if each.failed), None):
            return fault
        total = sum(weight * grades[name].reward for name, weight, _ in parts if name in grades)
        metrics = {name: each.reward for name, each in grades.items()}
        if (first := grades.get(names[0])) is None:
            return Grade(total, metrics)
        return Grade(total, metrics, first.status, first.extracted, correct=is_right(first, ranges[0]))

    return reward, (lowest, None if None in tops else sum(tops))
