"""Author's modules in a process of their own: imported, set up, listed and tried out, whatever they do there.

A module may hang, exit, crash or print without end (``loading_child`` is where); it costs its own answer and no other.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron_rl.chat import ChatFormat
from megatron_rl.environments.child import LOAD_SECONDS, kill_group, start_child
from megatron_rl.environments.wire import receive, send
from megatron_rl.errors import ConfigError, one_line

PROGRAM = "megatron_rl.environments.loading_child"
MAX_FAILURES = 10
"""Children that may fail before the rest is not looked at: each may take a whole deadline."""
MAX_OUTPUT = 16 * 2**20
"""Bytes that a child may print; one printed 800 MB to the terminal of ``--check``."""
KEPT_OUTPUT = 4_000
"""Bytes of it that are kept, from the end."""
START_SECONDS = 60.0
"""Shortest deadline of the child's own start, whatever its stages are given."""
TELL_SECONDS = 15.0
POLL_SECONDS = 0.05

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """What came of the work: a result, or problems."""

    result: Any = None
    problems: tuple[str, ...] = ()
    failed_at: str = ""
    """The entry (file and line) or module at which the child ended, if at one; the next child leaves it out."""
    output: str = ""
    """The end of what was printed."""


@dataclass(frozen=True)
class Surveyed:
    """What a run's checks ask about an environment whose tasks are sound."""

    name: str
    evaluation_only: bool
    lowest_reward: float
    """That it declares."""
    test_tasks: int
    first_chat: str | None
    """The id of a task whose prompt is chat messages."""
    demonstrates: bool
    """Whether it has demonstrations; False also if nobody asked."""
    overlong: Sequence[int] | None
    """Buffer, longest and longest free response in tokens, of an environment that reads a data set."""
    max_turns: int = 1
    is_harness: bool = False
    chat: ChatFormat = ChatFormat()
    """What its entry of the list says of chats."""


def found(seconds: float = LOAD_SECONDS) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    """The description of every environment there is by name, and the problem and traceback of each broken one."""
    answer, failures = all_but_failing("find_all", {}, seconds)
    if answer.problems:
        raise ConfigError(answer.problems)
    broken = {name: (f"cannot be imported: {why}", trace) for name, (why, trace) in answer.result["broken"].items()}
    broken |= {name: (problem, "") for name, problem in failures.items()}
    return answer.result["environments"], dict(sorted(broken.items()))


def inspected(name: str, options: Sequence[str], limit: int, seconds: float = LOAD_SECONDS) -> Answer:
    """The self-test of the environment ``name`` with ``options`` such as ``max_terms=6``.

    The result has a ``title`` and ``checks``: rows of name, verdict (None: there is nothing to check) and detail.
    """
    return _run_in_child("inspect", {"name": name, "options": list(options), "limit": limit}, seconds)


def surveyed(path: str | Path, seconds: float = LOAD_SECONDS, demonstrations: bool = False) -> list[Surveyed]:
    """The environments of the list at ``path``; one ``ConfigError`` carries all problems found."""
    answer, failures = all_but_failing("survey", {"path": str(path), "demonstrations": demonstrations}, seconds)
    lines = sorted(failures, key=lambda where: int(where.rpartition(":")[2]))
    problems = [*(failures[where] for where in lines), *answer.problems]
    if problems:
        raise ConfigError(problems)
    return [Surveyed(**row | {"chat": ChatFormat(**row["chat"])}) for row in answer.result]


def all_but_failing(
    work: str, arguments: Mapping[str, Any], seconds: float, program: str = PROGRAM
) -> tuple[Answer, dict[str, str]]:
    """The answer without the modules or entries that ended their child, and the problem of each of those."""
    failures: dict[str, str] = {}
    while True:
        answer = _run_in_child(work, {**arguments, "skip": list(failures)}, seconds, program)
        if not answer.failed_at or len(failures) >= MAX_FAILURES:
            return answer, failures
        failures[answer.failed_at] = answer.problems[0]


def _run_in_child(work: str, arguments: Mapping[str, Any], seconds: float, program: str = PROGRAM) -> Answer:
    """The answer of ``work(**arguments)`` in the module ``program``; each stage it reports may take ``seconds``."""
    with tempfile.TemporaryFile() as printed:
        process, channel = start_child(program, os.environ, stdout=printed, stderr=subprocess.STDOUT)
        key, who, doing = "", "the process that loads modules", "it started"
        try:
            send(channel, {"work": work, "arguments": dict(arguments), "parent": os.getpid()})
            message = _next_message(process, channel, printed.fileno(), max(seconds, START_SECONDS), f"{who}: {doing}")
            while "stage" in message:
                key, who, doing = message["stage"]
                message = _next_message(process, channel, printed.fileno(), seconds, f"{who}: {doing}")
        except (OSError, EOFError):
            message = {"failed": _ended(process)}
        finally:
            channel.close()
            kill_group(process.pid)
            process.wait()
        # not by seeking: the child writes at the same position
        last = os.pread(printed.fileno(), KEPT_OUTPUT, max(os.fstat(printed.fileno()).st_size - KEPT_OUTPUT, 0))
    output = last.decode("utf-8", errors="replace")
    if not message.keys() & {"raised", "failed"}:
        return Answer(message.get("result"), tuple(message.get("problems", ())), output=output)
    # where it raised, its last words are the traceback
    said = f"; its last words: {one_line(output[-200:])}" if "failed" in message and output.strip() else ""
    what, advice = message.get("raised") or message["failed"], message.get("advice", "mend it, or leave it out")
    return Answer(problems=(f"{who} {what} while {doing}; {advice}{said}",), failed_at=key, output=output)


def _next_message(
    process: subprocess.Popen, channel: Connection, printed: int, seconds: float, stage: str
) -> dict[str, Any]:
    """What the child says next, or ``failed`` where it takes or prints too much; ``EOFError`` when it has ended."""
    start, told = time.monotonic(), False
    while not channel.poll(POLL_SECONDS):
        if process.poll() is not None and not channel.poll(0):
            raise EOFError  # a fork that it left behind may hold the channel open
        if os.fstat(printed).st_size > MAX_OUTPUT:
            return {"failed": f"printed more than {MAX_OUTPUT // 2**20} MiB", "advice": "print less"}
        waited = time.monotonic() - start
        if waited > seconds:
            advice = "mend it, or raise --rl-environment-load-timeout"
            return {"failed": f"took more than {seconds:g} s", "advice": advice}
        if waited > TELL_SECONDS and not told:
            told = True
            logger.info("%s (for %.0f s; it may take %g s)", stage, waited, seconds)
    return receive(channel)


def _ended(process: subprocess.Popen) -> str:
    try:
        status = process.wait(0.2)
    except subprocess.TimeoutExpired:
        return "closed the files of its process"
    if status >= 0:
        return f"ended the process with status {status}"
    name = signal.Signals(-status).name
    return f"was killed by {name}" + (", likely for want of memory," if name == "SIGKILL" else "")
