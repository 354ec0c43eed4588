"""Grades one sample or takes one step; whatever the environment does, the outcome is a result, not an exception."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_rl.environments.base import Environment
from megatron_rl.environments.wire import continuation_of, failed, graded
from megatron_rl.types import Grade, GradeResult, Item, Step, Task, Transcript, Turn

logger = logging.getLogger(__name__)


def grade_one(environment: Environment, task: Task, transcript: Transcript) -> GradeResult:
    """The environment's verdict on one sample, checked to be a finite number."""
    return _attempt(environment, task, lambda: _result(environment.grade(task, transcript)))


def step_one(environment: Environment, task: Task, state: Any, turn: Turn) -> GradeResult:
    """The environment's answer to one turn; with a ``continuation`` unless the conversation ends here."""
    return _attempt(environment, task, lambda: _answer(environment, environment.step(task, state, turn)))


def judge_item(environment: Environment, item: Item) -> GradeResult:
    """``grade_one`` or ``step_one``, whichever the item is for."""
    return grade_one(environment, *item) if len(item) == 2 else step_one(environment, *item)


def _attempt(environment: Environment, task: Task, judge: Callable[[], GradeResult]) -> GradeResult:
    try:
        return judge()
    except (Exception, SystemExit) as error:  # an author's code may raise anything
        logger.warning("%s: task %r could not be graded", environment.name, task.id, exc_info=True)
        return failed("environment_exception", _describe(error))


def _result(verdict: float | Grade) -> GradeResult:
    if isinstance(verdict, Grade):
        return graded(verdict.reward, verdict.metrics, verdict.status, verdict.extracted)
    return graded(verdict, {})


def _answer(environment: Environment, step: Step) -> GradeResult:
    if not isinstance(step, Step):
        return failed("environment_exception", f"step returned a {type(step).__name__}, not a Step")
    if step.done:
        return _result(step.reward)
    result = _result(environment.reward_range[0] if step.reward is None else step.reward)
    if result.status == "error":
        return result
    return replace(result, continuation=continuation_of(step.messages, step.state))


def _describe(error: BaseException) -> str:
    """``ValueError: no number (grader.py:12)``: the type, the text and the line that raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = frame.filename.rpartition("/")[2]
    return f"{type(error).__name__}: {error} ({place}:{frame.lineno})"
