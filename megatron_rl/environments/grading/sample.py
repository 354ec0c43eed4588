"""Grades one sample; whatever the environment does, the outcome is a result, not an exception."""

from __future__ import annotations

import logging
import traceback

from megatron_rl.environments.base import Environment
from megatron_rl.environments.wire import failed, graded
from megatron_rl.types import Grade, GradeResult, Task, Transcript

logger = logging.getLogger(__name__)


def grade_one(environment: Environment, task: Task, transcript: Transcript) -> GradeResult:
    """The environment's verdict on one sample, checked to be a finite number."""
    try:
        verdict = environment.grade(task, transcript)
        if isinstance(verdict, Grade):
            return graded(verdict.reward, verdict.metrics, verdict.status, verdict.extracted)
        return graded(verdict, {})
    except (Exception, SystemExit) as error:  # an author's code may raise anything
        logger.warning("%s: task %r could not be graded", environment.name, task.id, exc_info=True)
        return failed("environment_exception", _describe(error))


def _describe(error: BaseException) -> str:
    """``ValueError: no number (grader.py:12)``: the type, the text and the line that raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = frame.filename.rpartition("/")[2]
    return f"{type(error).__name__}: {error} ({place}:{frame.lineno})"
