"""What crosses a process boundary: tasks and what the model said as JSON, and where the server listens.

Written by one side, checked by the other. Nothing is pickled, so nothing is run by being received.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self, get_args

from megatron_rl.atomic import write_text_atomic
from megatron_rl.chat import ChatFormat
from megatron_rl.errors import EnvironmentFault
from megatron_rl.json_text import dumps, loads
from megatron_rl.types import Demonstration, FinishReason, HarnessRun, Item, LaterTurn, Message, Task, Transcript, Turn

LOADING = ", now loading: "
"""In a line of the server's log that names what may not come back; its supervisor reads it."""
MAX_SENT = 64 * 2**20
"""Bytes of a value that ``receive`` takes."""


class WireError(ValueError):
    """A JSON value is not what it should be; the message names the key."""


@dataclass(frozen=True)
class ServedEnvironment:
    """The properties of a served environment that a run asks for."""

    name: str
    weight: float
    """Share of the training prompts, relative to the others."""
    evaluation_only: bool
    max_turns: int
    """How often the model may speak in a conversation."""
    is_harness: bool = False
    """Whether its samples are run and not graded."""
    eval_prompts: int | None = None
    eval_samples: int | None = None
    """Of an evaluation, where the list says another number than the flags."""
    chat: ChatFormat = ChatFormat()
    """Of prompts that are chats, before what the flags say."""
    reward_range: tuple[float, float | None] = (0.0, 1.0)
    """See `Environment.reward_range`."""
    group_seconds: float | None = None
    """How long grading a group may take where its answers are graded together; None: each is graded alone."""

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """Read the fields from JSON, which may have others."""
        known = {each.name: row[each.name] for each in fields(cls)}
        return cls(**known | {"chat": ChatFormat(**row["chat"])})


def read_key(value: object, key: str, kind: type | tuple[type, ...], where: str = "") -> Any:
    """Return ``value[key]``, which must be of type ``kind``; ``where`` is how messages call ``value``."""
    path = f"{where}.{key}" if where else key
    if not isinstance(value, Mapping):
        raise WireError(f"{where or 'the body'} must be an object, not {type(value).__name__}")
    if key not in value:
        raise WireError(f"{path} is missing; there is: {', '.join(map(str, value)) or 'nothing'}")
    if not isinstance(value[key], kind) or (isinstance(value[key], bool) and kind is not bool):
        raise WireError(f"{path} has the wrong type {type(value[key]).__name__}")
    return value[key]


def task_from_json(value: object, where: str = "task") -> Task:
    prompt = read_key(value, "prompt", (str, list), where)
    if not isinstance(prompt, str):
        prompt = messages_of(prompt, f"{where}.prompt")
    return Task(read_key(value, "id", str, where), prompt, read_key(value, "data", dict, where))


def messages_of(value: Sequence[object], where: str) -> tuple[Message, ...]:
    """Return the chat messages of a JSON list; one that calls tools may have null in place of its content."""
    for index, message in enumerate(value):
        inside = f"{where}[{index}]"
        read_key(message, "role", str, inside)
        calls = read_key(message, "tool_calls", list, inside) if message.get("tool_calls") is not None else []
        if not calls or message.get("content") is not None:
            read_key(message, "content", str, inside)
        for number, call in enumerate(calls):
            called = f"{inside}.tool_calls[{number}]"
            for key in ("name", "arguments"):
                read_key(read_key(call, "function", Mapping, called), key, str, f"{called}.function")
    return tuple(value)


def demonstration_to_json(demonstration: Demonstration) -> dict[str, Any]:
    shown = {"task": vars(demonstration.task), "completion": demonstration.completion}
    return shown | ({"later": [vars(turn) for turn in demonstration.later]} if demonstration.later else {})


def demonstration_from_json(value: object, where: str = "demonstration") -> Demonstration:
    task = task_from_json(read_key(value, "task", dict, where), f"{where}.task")
    later = []
    for index, turn in enumerate(read_key(value, "later", list, where) if "later" in value else ()):
        inside = f"{where}.later[{index}]"
        messages = messages_of(read_key(turn, "messages", list, inside), f"{inside}.messages")
        later.append(LaterTurn(messages, read_key(turn, "completion", str, inside)))
    return Demonstration(task, read_key(value, "completion", str, where), tuple(later))


def item_to_json(item: Item) -> dict[str, Any]:
    if len(item) == 2:
        return {"task": vars(item[0]), "transcript": vars(item[1])}
    return {"task": vars(item[0]), "state": item[1], "turn": vars(item[2])}


def item_from_json(value: object, where: str = "item") -> Item:
    """Return the sample of a JSON object, or the step where it has a ``turn``."""
    task = task_from_json(read_key(value, "task", dict, where), f"{where}.task")
    said = "turn" if "turn" in value else "transcript"
    inside = f"{where}.{said}"
    spoken = read_key(value, said, dict, where)
    known = _transcript(spoken, inside)
    if said == "transcript":
        return task, known
    number, last = read_key(spoken, "number", int, inside), read_key(spoken, "last", bool, inside)
    parser = read_key(spoken, "tool_call_parser", str, inside) if "tool_call_parser" in spoken else ""
    return task, value.get("state"), Turn(**vars(known), number=number, last=last, tool_call_parser=parser)


def _transcript(spoken: object, inside: str) -> Transcript:
    reason = read_key(spoken, "finish_reason", str, inside)
    if reason not in get_args(FinishReason):
        raise WireError(f"{inside}.finish_reason is {reason!r}; use one of {', '.join(get_args(FinishReason))}")
    return Transcript(read_key(spoken, "text", str, inside), reason, read_key(spoken, "num_tokens", int, inside))


def group_to_json(task: Task, transcripts: Sequence[Transcript]) -> dict[str, Any]:
    return {"task": vars(task), "transcripts": list(map(vars, transcripts))}


def group_from_json(value: object, where: str = "group") -> tuple[Task, list[Transcript]]:
    """Return the task and the answers of a group that is graded together."""
    task, spoken = task_from_json(read_key(value, "task", dict, where), f"{where}.task"), f"{where}.transcripts"
    answers = read_key(value, "transcripts", list, where)
    if not answers:  # the pool of graders reads from the first result how a group ended
        raise WireError(f"{spoken} is empty; a group has at least one answer")
    return task, [_transcript(answer, f"{spoken}[{index}]") for index, answer in enumerate(answers)]


def run_to_json(run: HarnessRun) -> dict[str, Any]:
    client = {"base_url": run.base_url, "api_key": run.api_key, "model": run.model}
    return {"task": vars(run.task), "sample": run.sample, "client": client}


def run_from_json(value: object, where: str = "item") -> HarnessRun:
    task = task_from_json(read_key(value, "task", dict, where), f"{where}.task")
    client, inside = read_key(value, "client", dict, where), f"{where}.client"
    known = (read_key(client, name, str, inside) for name in ("base_url", "api_key", "model"))
    return HarnessRun(task, read_key(value, "sample", int, where), *known)


def send(channel: Connection, value: object) -> None:
    """Sends one value to another process; ``OSError`` when it is gone."""
    channel.send_bytes(dumps(value).encode())


def receive(channel: Connection) -> Any:
    """Return the next value; ``EOFError`` from a closed channel, ``OSError`` or ``ValueError`` for foreign bytes."""
    return loads(channel.recv_bytes(MAX_SENT))


@dataclass(frozen=True)
class Address:
    """Everything a client needs; who holds the token may use the server."""

    url: str
    """``http://127.0.0.1:PORT`` or ``unix:/PATH``."""
    token: str
    pid: int


class ServerGivenUp(EnvironmentFault):
    """There is no server and will be none."""


def write_private(path: Path, text: str) -> None:
    """Writes the file in one step, readable by its owner alone: a reader sees all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(path, text, private=True)


def write_address(path: Path, address: Address) -> None:
    """Tells clients where the server is."""
    write_private(path, dumps(vars(address)))


def read_address(path: Path) -> Address:
    """Read the address in the file; ``EnvironmentFault`` when there is none yet, ``ServerGivenUp`` when it says so."""
    try:
        value = loads(path.read_text(encoding="utf-8"))
        if "fault" in value:
            raise ServerGivenUp(value["fault"])
        return Address(read_key(value, "url", str), read_key(value, "token", str), read_key(value, "pid", int))
    except OSError as error:
        raise EnvironmentFault(f"no environment server has written {path}: {error.strerror}") from error
    except ValueError as error:
        raise EnvironmentFault(f"{path} is not the address of an environment server: {error}") from error
