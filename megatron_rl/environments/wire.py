"""The JSON form of tasks, transcripts and grades: written by one side, checked by the other.

JSON here is strict: NaN and infinity, which Python would write and read, are refused on both sides.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, get_args

from megatron_rl.types import (
    Continuation,
    Demonstration,
    FinishReason,
    GradeResult,
    Item,
    LaterTurn,
    Message,
    Prompt,
    Task,
    Transcript,
    Turn,
)

MAX_MESSAGE = 2000
"""Longest error text of an item; an author's exception may quote the whole completion."""
MAX_CONTINUATION = 2**20
"""Most characters of a step's messages and state; they travel with every turn."""
MAX_EXTRACTED = 500
"""Longest extracted answer that travels; what is longer is for reading only and gets cut."""


MAX_DEPTH = 64
"""What is deeper than Python's own limit of about 1000 could be read and then not be written again."""
MAX_VALUES = 1_000_000
"""At one depth; a few lists that hold each other many times are more than any memory when they are written."""


class WireError(ValueError):
    """A JSON value is not what it should be; the message names the key."""


def dumps(value: object) -> str:
    """Strict JSON text; ``ValueError`` for NaN and infinity."""
    return json.dumps(value, allow_nan=False)


def loads(text: bytes | str) -> Any:
    """The value of strict JSON text; ``ValueError`` for anything else, hostile nesting and repeated keys included."""
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Which of two values counts is a matter of the reader: both sides must mean the same one."""
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        again = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {again[:80]!r} occurs twice")
    return value


def check_bounds(value: object, texts: bool = True) -> None:
    """``ValueError`` for a value nested too deeply or too large, or with ``texts`` one that holds a lone surrogate.

    Not by recursion, which has a depth limit of its own.
    """
    level, depth = [value], 0
    while level:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")
        below: list[object] = []
        for item in level:
            if isinstance(item, Mapping):
                below += item.values()
                if texts:
                    below += item
            elif isinstance(item, (list, tuple)):
                below += item
            elif texts and isinstance(item, str):
                _check_text(item)
            if len(below) > MAX_VALUES:
                raise ValueError(f"more than {MAX_VALUES:,} values")
        level, depth = below, depth + 1


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"a text holds the lone surrogate U+{ord(text[error.start]):X}") from None


def read_key(value: object, key: str, kind: type | tuple[type, ...], where: str) -> Any:
    """``value[key]``, which must be of type ``kind``; ``where`` is how messages call ``value``."""
    path = f"{where}.{key}" if where else key
    if not isinstance(value, Mapping):
        raise WireError(f"{where or 'the body'} must be an object, not {type(value).__name__}")
    if key not in value:
        raise WireError(f"{path} is missing; there is: {', '.join(map(str, value)) or 'nothing'}")
    if not isinstance(value[key], kind) or (isinstance(value[key], bool) and kind is not bool):
        raise WireError(f"{path} has the wrong type {type(value[key]).__name__}")
    return value[key]


def task_to_json(task: Task) -> dict[str, Any]:
    """The JSON object of a task."""
    prompt = task.prompt if isinstance(task.prompt, str) else [dict(message) for message in task.prompt]
    return {"id": task.id, "prompt": prompt, "data": dict(task.data)}


def task_from_json(value: object, where: str = "task") -> Task:
    """The task of a JSON object."""
    prompt: Prompt = read_key(value, "prompt", (str, list), where)
    if not isinstance(prompt, str):
        prompt = _messages(prompt, f"{where}.prompt")
    return Task(read_key(value, "id", str, where), prompt, read_key(value, "data", dict, where))


def _messages(value: Sequence[object], where: str) -> tuple[Message, ...]:
    for index, message in enumerate(value):
        for key in ("role", "content"):
            read_key(message, key, str, f"{where}[{index}]")
    return tuple(value)


def demonstration_to_json(demonstration: Demonstration) -> dict[str, Any]:
    """The JSON object of a demonstration."""
    later = [
        {"messages": [dict(message) for message in turn.messages], "completion": turn.completion}
        for turn in demonstration.later
    ]
    shown = {"task": task_to_json(demonstration.task), "completion": demonstration.completion}
    return shown | {"later": later} if later else shown


def demonstration_from_json(value: object, where: str = "demonstration") -> Demonstration:
    """The demonstration of a JSON object."""
    task = task_from_json(read_key(value, "task", dict, where), f"{where}.task")
    later = read_key(value, "later", list, where) if "later" in value else []
    turns = tuple(
        LaterTurn(
            _messages(read_key(turn, "messages", list, f"{where}.later[{index}]"), f"{where}.later[{index}].messages"),
            read_key(turn, "completion", str, f"{where}.later[{index}]"),
        )
        for index, turn in enumerate(later)
    )
    return Demonstration(task, read_key(value, "completion", str, where), turns)


def transcript_to_json(transcript: Transcript) -> dict[str, Any]:
    """The JSON object of a transcript."""
    return {
        "text": transcript.text,
        "finish_reason": transcript.finish_reason,
        "num_tokens": transcript.num_tokens,
    }


def transcript_from_json(value: object, where: str = "transcript") -> Transcript:
    """The transcript of a JSON object."""
    reason = read_key(value, "finish_reason", str, where)
    if reason not in get_args(FinishReason):
        known = ", ".join(get_args(FinishReason))
        raise WireError(f"{where}.finish_reason is {reason!r}; use one of {known}")
    text = read_key(value, "text", str, where)
    return Transcript(text, reason, read_key(value, "num_tokens", int, where))


def turn_to_json(turn: Turn) -> dict[str, Any]:
    """The JSON object of a turn."""
    return transcript_to_json(turn) | {"number": turn.number, "last": turn.last}


def turn_from_json(value: object, where: str = "turn") -> Turn:
    """The turn of a JSON object."""
    said = transcript_from_json(value, where)
    number, last = read_key(value, "number", int, where), read_key(value, "last", bool, where)
    return Turn(said.text, said.finish_reason, said.num_tokens, number, last)


def item_to_json(item: Item) -> dict[str, Any]:
    """The JSON object of a sample to grade or a step to take."""
    if len(item) == 2:
        return {"task": task_to_json(item[0]), "transcript": transcript_to_json(item[1])}
    return {"task": task_to_json(item[0]), "state": item[1], "turn": turn_to_json(item[2])}


def continuation_of(messages: object, state: object) -> Continuation:
    """A continuation that JSON returns unchanged; ``WireError`` or ``TypeError`` says what does not."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise WireError(f"messages is {messages!r:.80}; a step that is not done needs a tuple of messages")
    kept = _messages([dict(message) for message in messages], "messages")
    text = dumps({"messages": kept, "state": state})
    if len(text) > MAX_CONTINUATION:
        raise WireError(f"messages and state have {len(text)} characters; at most {MAX_CONTINUATION} travel")
    if loads(text)["state"] != state:  # a tuple becomes a list: the next step would see another value
        raise WireError(f"state is a value that JSON does not return unchanged: {state!r:.80}")
    return Continuation(kept, state)


def graded(reward: object, metrics: object, verdict: object = "", extracted: object = None) -> GradeResult:
    """The result of a reward, or the error ``invalid_reward`` when it is not a finite number.

    A truth value is refused as a reward (it tells of a comparison where a score was meant) and read as 0 or 1
    among the metrics.
    """
    if isinstance(reward, bool) or not _is_finite(reward):
        kind = type(reward).__name__
        return failed("invalid_reward", f"the reward is {reward!r} of type {kind}, no finite number")
    if not isinstance(metrics, Mapping):
        return failed("invalid_reward", f"the metrics are of type {type(metrics).__name__}, not a mapping")
    for name, value in metrics.items():
        if not isinstance(name, str) or not _is_finite(value):
            return failed("invalid_reward", f"the metric {name!r} is {value!r}, no finite number")
    return GradeResult(
        "ok",
        float(reward),
        {name: float(value) for name, value in metrics.items()},
        verdict=str(verdict)[:MAX_EXTRACTED],
        extracted=None if extracted is None else str(extracted)[:MAX_EXTRACTED],
    )


def failed(code: str, message: str) -> GradeResult:
    """The result of a sample that could not be graded."""
    return GradeResult("error", code=code, message=message[:MAX_MESSAGE])


def result_to_json(result: GradeResult) -> dict[str, Any]:
    """The JSON object of a result."""
    if result.status == "ok":
        plain = {"status": "ok", "reward": result.reward, "metrics": dict(result.metrics)}
        why = {"verdict": result.verdict, "extracted": result.extracted} if result.verdict else {}
        return plain | why | _continuation_to_json(result.continuation)
    return {"status": "error", "code": result.code, "message": result.message}


def _continuation_to_json(continuation: Continuation | None) -> dict[str, Any]:
    if continuation is None:
        return {}
    return {"messages": [dict(message) for message in continuation.messages], "state": continuation.state}


def results_from_json(value: object, count: int) -> list[GradeResult]:
    """The ``count`` results of an answer; rewards are checked again, whoever sent them."""
    items: Sequence[object] = read_key(value, "items", list, "")
    if len(items) != count:
        raise WireError(f"the answer has {len(items)} items for {count} samples")
    results = []
    for index, item in enumerate(items):
        where = f"items[{index}]"
        if read_key(item, "status", str, where) == "ok":
            why = item.get("verdict", ""), item.get("extracted")
            result = graded(item.get("reward"), item.get("metrics", {}), *why)
            if result.status == "ok" and "messages" in item:
                result = replace(result, continuation=continuation_of(item["messages"], item.get("state")))
            results.append(result)
        else:
            code = read_key(item, "code", str, where)
            results.append(failed(code, read_key(item, "message", str, where)))
    return results


def _is_finite(value: object) -> bool:
    """Numpy scalars are numbers too; an integer too large for a float is not one here."""
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False
