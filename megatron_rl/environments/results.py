"""What came of a sample: an environment's verdict as a result, made where it is graded and read where it arrives.

Whatever the environment does, the outcome is a result and not an exception.
"""

from __future__ import annotations

import logging
import math
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from numbers import Real
from typing import Any

from megatron_rl.environments.agents import name_problem
from megatron_rl.environments.base import Environment, GroupEnvironment
from megatron_rl.environments.loader import authors_frames
from megatron_rl.environments.wire import WireError, messages_of, read_key
from megatron_rl.json_text import dumps, loads
from megatron_rl.types import Continuation, Grade, Item, Step, Task, Transcript

VERDICTS = frozenset({"correct", "wrong", "no_answer", "unparsable", "timeout"})
"""Of the graders in this library; an environment may have words of its own."""
ROUNDING = 1e-6
"""Of the range of rewards: 0.7 + 0.2 + 0.1 is less than 1."""
MAX_MESSAGE = 2000
"""Longest error text of an item; an author's exception may quote the whole completion."""
MAX_CONTINUATION = 2**20
"""Most characters of a step's messages and state; they travel with every turn."""
MAX_EXTRACTED = 500
"""Longest extracted answer that travels; what is longer is for reading only and gets cut."""
_OF_HARNESSES = ("completion_rewards", "agent_rewards")

logger = logging.getLogger(__name__)


def judge(environment: Environment, item: Item) -> Grade:
    """Return the environment's verdict on a sample, checked to be a finite number, or its answer to a turn, with a
    ``continuation`` unless the conversation ends here."""
    if len(item) == 2:
        return grade_or_failure(environment, item[0], lambda: _graded(environment.grade(*item)))
    return grade_or_failure(environment, item[0], lambda: _answer(environment, environment.step(*item)))


def judge_group(environment: GroupEnvironment, task: Task, transcripts: Sequence[Transcript]) -> list[Grade]:
    """Return the environment's verdict on each sample of a group; all have failed if it has not judged every one."""

    def ask() -> list[Grade]:
        verdicts = list(environment.grade_group(task, transcripts))
        if len(verdicts) != len(transcripts):
            raise ValueError(f"grade_group returned {len(verdicts)} grades for {len(transcripts)} answers")
        return list(map(_graded, verdicts))

    return _results(environment, task, ask, len(transcripts))


def grade_or_failure(environment: Environment, task: Task, ask: Callable[[], Grade]) -> Grade:
    """Return what ``ask`` returns and whether it is right, or the result that says what it raised and where."""
    return _results(environment, task, lambda: [ask()], 1)[0]


def _results(environment: Environment, task: Task, ask: Callable[[], list[Grade]], count: int) -> list[Grade]:
    try:
        bounds = environment.reward_range
        return [each if each.failed else replace(each, correct=is_right(each, bounds)) for each in ask()]
    except (Exception, SystemExit) as error:  # an author's code may raise anything
        logger.warning("%s: task %r could not be graded", environment.name, task.id, exc_info=True)
        # of an error inside a library, such as a refusal that an OpenAI client was sent, the author's own line
        own = [frame for frame in authors_frames(error) if "site-packages" not in frame.filename]
        frame = (own or traceback.extract_tb(error.__traceback__))[-1]
        place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        return [failed("environment_exception", f"{type(error).__name__}: {error} ({place})")] * count


def _answer(environment: Environment, step: Step) -> Grade:
    if not isinstance(step, Step):
        return failed("environment_exception", f"step returned a {type(step).__name__}, not a Step")
    if isinstance(step.turn_reward, bool) or not _is_finite(step.turn_reward):
        return failed("invalid_reward", f"the turn_reward is {step.turn_reward!r:.80}, no finite number")
    unfinished = environment.reward_range[0] if step.reward is None else step.reward
    result = replace(_graded(step.reward if step.done else unfinished), turn_reward=float(step.turn_reward))
    if result.failed or step.done:
        return result
    return replace(result, continuation=continuation_of(step.messages, step.state))


def _graded(verdict: object) -> Grade:
    """The checked grade of an environment that does not call the model itself."""
    result = checked_grade(verdict)
    if result.completion_rewards or result.agent_rewards:
        why = "completion_rewards and agent_rewards are of harnesses; give Step(turn_reward=...)"
        return failed("invalid_reward", why)
    return result


def continuation_of(messages: object, state: object) -> Continuation:
    """Return a continuation that JSON returns unchanged; ``WireError`` or ``TypeError`` says what does not."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise WireError(f"messages is {messages!r:.80}; a step that is not done needs a tuple of messages")
    kept = messages_of([dict(message) for message in messages], "messages")
    text = dumps({"messages": kept, "state": state})
    if len(text) > MAX_CONTINUATION:
        raise WireError(f"messages and state have {len(text)} characters; at most {MAX_CONTINUATION} travel")
    if loads(text)["state"] != state:  # a tuple becomes a list: the next step would see another value
        raise WireError(f"state is a value that JSON does not return unchanged: {state!r:.80}")
    return Continuation(kept, state)


def is_right(grade: Grade, reward_range: tuple[float, float | None]) -> bool | None:
    """Return what the environment says; else the verdict if it is one of the graders' words, else whether the reward is
    the highest there is.

    By the reward alone a wrong answer that gets a format reward might be right, and a right one whose length was
    punished wrong. None where there is no highest reward, or the reward lies outside the range, which is then not its.
    """
    if grade.correct is not None:
        return grade.correct
    if grade.status in VERDICTS:
        return grade.status == "correct"
    lowest, highest = reward_range
    if highest is None:
        return None
    rounding = ROUNDING * (highest - lowest)
    if not lowest - rounding <= grade.reward <= highest + rounding:
        return None
    return grade.reward >= highest - rounding


def checked_grade(verdict: object) -> Grade:
    """Return the result of a reward or ``Grade``, or the error ``invalid_reward`` when it is not a finite number.

    A truth value is refused as a reward (it tells of a comparison where a score was meant) and read as 0 or 1
    among the metrics.
    """
    grade = verdict if isinstance(verdict, Grade) else Grade(verdict)
    if isinstance(grade.reward, bool) or not _is_finite(grade.reward):
        kind = type(grade.reward).__name__
        return failed("invalid_reward", f"the reward is {grade.reward!r} of type {kind}, no finite number")
    named = {what: getattr(grade, what) for what in ("metrics", "completion_rewards", "agent_rewards")}
    for what, numbers in named.items():
        if not isinstance(numbers, Mapping):
            return failed("invalid_reward", f"the {what} are of type {type(numbers).__name__}, not a mapping")
        for name, value in numbers.items():
            if not isinstance(name, str) or not _is_finite(value):
                return failed("invalid_reward", f"of the {what}, {name!r} is {value!r}, no finite number")
    if problem := next(filter(None, map(name_problem, grade.agent_rewards)), ""):
        return failed("invalid_reward", f"of the agent_rewards, {problem}")
    if grade.correct not in (None, True, False):
        return failed("invalid_reward", f"correct is {grade.correct!r:.80}; it must be True, False or None")
    numbers = {what: {name: float(value) for name, value in given.items()} for what, given in named.items()}
    extracted = None if grade.extracted is None else str(grade.extracted)
    correct = None if grade.correct is None else bool(grade.correct)
    return Grade(float(grade.reward), status=str(grade.status), extracted=extracted, correct=correct, **numbers)


def _is_finite(value: object) -> bool:
    """Numpy scalars are numbers too; an integer too large for a float is not one here."""
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False


def failed(code: str, message: str) -> Grade:
    """Return the result of a sample that could not be graded."""
    return Grade(None, code=code, message=message)


def result_to_json(result: Grade) -> dict[str, Any]:
    """Return a result's JSON object. Long texts are cut here, once keys in them are replaced: no half keys stay."""
    if result.failed:
        return {"status": "error", "code": result.code, "message": result.message[:MAX_MESSAGE]}
    shown = {"status": "ok", "reward": result.reward, "metrics": dict(result.metrics)}
    if result.correct is not None:
        shown["correct"] = result.correct
    if result.status:
        extracted = None if result.extracted is None else result.extracted[:MAX_EXTRACTED]
        shown |= {"verdict": result.status[:MAX_EXTRACTED], "extracted": extracted}
    own = {"turn_reward": result.turn_reward, **{name: dict(getattr(result, name)) for name in _OF_HARNESSES}}
    shown |= {name: value for name, value in own.items() if value}
    return shown | ({} if result.continuation is None else asdict(result.continuation))


def result_from_json(item: object, where: str = "result") -> Grade:
    """Return the result of a JSON object; its reward is checked again, whoever sent it."""
    if read_key(item, "status", str, where) != "ok":
        return failed(read_key(item, "code", str, where), read_key(item, "message", str, where))
    told = (item.get("reward"), item.get("metrics", {}), item.get("verdict", ""), item.get("extracted"))
    own = {name: item.get(name, {}) for name in _OF_HARNESSES}
    result = checked_grade(Grade(*told, correct=item.get("correct"), **own))
    if not result.failed and "turn_reward" in item:
        result = replace(result, turn_reward=float(read_key(item, "turn_reward", (int, float), where)))
    if not result.failed and "messages" in item:
        return replace(result, continuation=continuation_of(item["messages"], item.get("state")))
    return result
