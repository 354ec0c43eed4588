"""Whether an environment can be trained on: the checks of ``megatron-rl test``.

A harness calls `scripted_model`, an OpenAI-compatible endpoint that says what it is told to.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from typing import Any

from megatron_rl.environments.base import Environment, HarnessEnvironment
from megatron_rl.environments.checks import splits_of, survey_tasks
from megatron_rl.environments.data import DatasetEnvironment
from megatron_rl.environments.loader import Begin, ignore
from megatron_rl.environments.results import ROUNDING, judge
from megatron_rl.errors import shorten
from megatron_rl.types import Grade, HarnessRun, Message, Task, Turn

TIMED_SECONDS = 2.0
SLOWEST = 10
"""Grades a second. A step of 64 groups of 16 would otherwise wait for two minutes."""
MOST_RUN = 5
"""Tasks of a split: each is run six times, and a sample may take a while."""

MAX_CALLS = 200
"""Of a sample: a harness that asks an empty answer's model again and again would not end."""

Said = str | Message
"""A text, or an assistant message with ``tool_calls``."""
Script = Callable[[int], Said | None]
"""What the model says at a call, counted from 0; None: it has nothing more to say, and the call is refused."""

Case = tuple[Task, Sequence[Said]]
"""A task and the model's turns."""
GradeCase = Callable[[Task, Sequence[Said]], Grade]
EMPTY = ("",)
"""The turns of a model that says nothing; to a harness it says nothing as often as it is asked."""


@dataclass(frozen=True)
class Check:
    """One row of the report; ``passed`` is None for a check the environment gives no material for."""

    name: str
    passed: bool | None
    detail: str


def run_checks(environment: Environment, limit: int = 100, begin: Begin = ignore) -> list[Check]:
    """Run all checks, the graded ones on the first ``limit`` tasks of each split, a harness's on ``MOST_RUN``."""
    problems = survey_tasks(environment, begin).problems
    if problems:
        return [Check("tasks", False, "; ".join(problems))]
    splits = splits_of(environment)
    is_harness = isinstance(environment, HarnessEnvironment)
    limit = min(limit, MOST_RUN) if is_harness else limit
    begin("its gold answers and demonstrations were read")
    tasks = [task for split in splits for task in islice(environment.tasks(split), limit)]
    gold = [(task, turns) for task in tasks if (turns := environment.gold_turns(task)) is not None]
    shown = [
        (row.task, [row.completion, *(turn.completion for turn in row.later)])
        for split in splits
        for row in islice(environment.demonstrations(split), limit)
    ]
    empty = [(task, EMPTY) for task in tasks]
    lowest, highest = environment.reward_range

    is_function = isinstance(environment, DatasetEnvironment) and ":" in environment.grader
    advice = "; where its form alone is wrong, write FORM = '... %s' beside the function" if is_function else ""
    played = partial(rehearse if is_harness else play, environment)

    def announced(task: Task, turns: Sequence[Said]) -> Grade:
        begin(f"it {'ran with' if is_harness else 'graded'} {_shown(turns)} to task {shorten(task.id)}")
        return played(task, turns)

    return [
        Check("tasks", True, f"the first {len(tasks)} of {', '.join(splits)}"),
        _rewards("gold answers", announced, gold, highest, advice),
        _rewards("demonstrations", announced, shown, highest),
        _rewards("empty answers", announced, empty, lowest),
        _agreement(announced, [*gold, *shown, *empty], with_metrics=not is_harness),
        _speed(played, [*gold, *shown] or empty, None if is_harness else SLOWEST),
    ]


def _rewards(name: str, grade: GradeCase, answers: Sequence[Case], wanted: float | None, advice: str = "") -> Check:
    """Every answer must get the reward ``wanted``, but for rounding."""
    if not answers or wanted is None:
        return Check(name, None, "the environment has none" if not answers else "no reward is the highest")
    for task, turns in answers:
        result = grade(task, turns)
        if result.failed or not math.isclose(result.reward, wanted, rel_tol=ROUNDING, abs_tol=ROUNDING):
            got = f"{result.code}: {result.message}" if result.failed else result.reward
            return Check(name, False, f"{_shown(turns)} to task {shorten(task.id)} gets {got}, not {wanted:g}{advice}")
    return Check(name, True, f"{len(answers)} at {wanted:g}")


def _agreement(grade: GradeCase, answers: Sequence[Case], with_metrics: bool) -> Check:
    """Among a harness's metrics may be seconds; of it, rewards alone must agree."""
    for task, turns in answers:
        first, second = (grade(task, turns) for _ in range(2))
        if (first if with_metrics else first.reward) != (second if with_metrics else second.reward):
            where = f"{_shown(turns)} to task {shorten(task.id)}"
            return Check("graded twice", False, f"{where} gets {first}, then {second}")
    return Check("graded twice", True, f"{len(answers)} agree")


def _speed(grade: GradeCase, answers: Sequence[Case], slowest: int | None) -> Check:
    """Grades a second in one thread; run last, when what the grader imports is loaded. A harness may be slow: many of
    its samples run at once."""
    start, count = time.perf_counter(), 0
    for task, turns in answers:
        grade(task, turns)
        count += 1
        if time.perf_counter() - start > TIMED_SECONDS:
            break
    rate = count / max(time.perf_counter() - start, 1e-9)
    if slowest is None:
        return Check("speed", None, f"{rate:,.3g} samples a second, one at a time, of a model that answers at once")
    # three digits: a microsecond grader measured over 100 answers gives no more
    shown = f"{float(f'{rate:.3g}'):,.0f} grades a second in one thread"
    why = "" if rate >= slowest else f"; fewer than {slowest} hold up every step"
    return Check("speed", rate >= slowest, shown + why)


def rehearse(environment: HarnessEnvironment, task: Task, turns: Sequence[Said]) -> Grade:
    """Return the result of a harness whose model says one of ``turns`` at each call; one more call is refused."""
    from megatron_rl.environments.harness import run_harness  # needs an extra, and graders do without

    script = always("") if turns == EMPTY else script_of(turns)
    with scripted_model(script) as url, tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        return run_harness(environment, HarnessRun(task, 0, url, "self-test"))


def play(environment: Environment, task: Task, turns: Sequence[str]) -> Grade:
    """Return the result of a conversation in which the model says ``turns``; a step of a single turn is a grade."""
    result, state = Grade(None, code="no_turns"), None
    for number, text in enumerate(turns):
        last = number + 1 == environment.max_turns
        result = judge(environment, (task, state, Turn(text, "stop", len(text), number, last)))
        if result.continuation is None:
            break
        state = result.continuation.state
    return replace(result, continuation=None)


def _shown(turns: Sequence[Said]) -> str:
    return ", then ".join(map(shorten, turns))


def script_of(turns: Sequence[Said]) -> Script:
    """Return the turns one after the other."""
    return lambda number: turns[number] if number < len(turns) else None


def always(said: Said) -> Script:
    """Return the same at every call, up to ``MAX_CALLS``."""
    return lambda number: said if number < MAX_CALLS else None


@contextlib.contextmanager
def scripted_model(script: Script) -> Iterator[str]:
    """Serve a model that follows ``script`` on a free port of loopback; yield its ``base_url``."""
    server = _Server(script)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script, self.numbers = script, itertools.count()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = next(self.server.numbers)
        said = self.server.script(number)
        if said is None:
            message = f"the script ends after {number} turns, and the harness asks for another"
            self._answer({"error": {"message": message, "type": "invalid_request_error"}}, 400)
        elif self.path.endswith("/chat/completions"):
            self._chat(said, asked)
        elif self.path.endswith(("/responses", "/messages")):
            self._blocks(said, asked)
        else:
            text = said if isinstance(said, str) else str(said.get("content") or "")
            choice = {"index": 0, "text": text, "finish_reason": "stop", "logprobs": None}
            self._answer(_completion("text_completion", choice, asked))

    def _blocks(self, said: Said, asked: Mapping[str, Any]) -> None:
        """The turn as OpenAI's items, or as Anthropic's blocks; not as a stream."""
        if asked.get("stream"):
            message = "the model of the self-test streams /v1/chat/completions alone; leave out 'stream' here"
            self._answer({"error": {"message": message, "type": "invalid_request_error"}}, 400)
            return
        message = {"content": said} if isinstance(said, str) else said
        text, calls = message.get("content"), message.get("tool_calls") or ()
        about = {"id": "scripted-0", "model": asked.get("model", "policy")}
        usage = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
        if self.path.endswith("/responses"):
            usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
            part = {"type": "output_text", "text": text, "annotations": []}
            whole = {"type": "message", "id": "msg_0", "role": "assistant", "status": "completed", "content": [part]}
            output = [*([whole] if text or not calls else [])]
            output += [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls]
            about |= {"object": "response", "created_at": 0, "status": "completed", "output": output}
            about |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        else:
            content = [{"type": "text", "text": text or ""}] if text or not calls else []
            for call in calls:
                called = {"name": call["function"]["name"], "input": json.loads(call["function"]["arguments"])}
                content.append({"type": "tool_use", "id": call["id"], **called})
            about |= {"type": "message", "role": "assistant", "content": content, "stop_sequence": None}
            about |= {"stop_reason": "tool_use" if calls else "end_turn"}
        self._answer(about | {"usage": usage})

    def do_GET(self) -> None:
        self._answer({"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": ""}]})

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def _chat(self, said: Said, asked: Mapping[str, Any]) -> None:
        message = {"role": "assistant", **({"content": said} if isinstance(said, str) else said)}
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        if not asked.get("stream"):
            choice = {"index": 0, "message": {"content": None, **message}, "finish_reason": reason, "logprobs": None}
            self._answer(_completion("chat.completion", choice, asked))
            return
        calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls") or ())]
        delta = message | ({"tool_calls": calls} if calls else {})
        chunks = [{"index": 0, "delta": delta, "finish_reason": None}]
        chunks.append({"index": 0, "delta": {}, "finish_reason": reason})
        lines = [json.dumps(_completion("chat.completion.chunk", chunk, asked)) for chunk in chunks]
        self._send("".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]), "text/event-stream")

    def _answer(self, value: object, status: int = 200) -> None:
        self._send(json.dumps(value), "application/json", status)

    def _send(self, text: str, kind: str, status: int = 200) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _completion(kind: str, choice: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    about = {"id": "scripted-0", "object": kind, "created": 0, "model": asked.get("model", "policy")}
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return about | {"choices": [choice]} | ({} if kind.endswith("chunk") else {"usage": usage})
