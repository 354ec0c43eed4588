"""Author's modules in a process of their own: imported, set up, listed and tried out, whatever they do there.

A module may hang, exit, crash or print without end (``loading_child`` is where); it costs its own answer and no other.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from megatron_rl.environments.limits import LOAD_SECONDS, importable, kill_group
from megatron_rl.environments.wire import receive, send
from megatron_rl.errors import ConfigError, one_line

MAX_FAILURES = 10
"""Children that may fail before the rest is not looked at: each may take a whole deadline."""
MAX_OUTPUT = 16 * 2**20
"""Bytes that a child may print; one printed 800 MB to the terminal of ``--check``."""
KEPT_OUTPUT = 4_000
"""Bytes of it that are kept, from the end."""
START_SECONDS = 60.0
"""Shortest deadline of the child's own start, whatever its stages are given."""
TELL_SECONDS = 15.0
POLL_SECONDS = 0.2

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """All environments there are."""

    environments: Mapping[str, str]
    """Descriptions by name."""
    broken: Mapping[str, str]
    """What is wrong with the others, one line each, by name."""
    tracebacks: Mapping[str, str]
    """Of those that raised."""


@dataclass(frozen=True)
class Stage:
    """What a child is about to do; if it does not come back, this is what it did."""

    key: str = ""
    """The entry or the module, in the caller's words; the next child is told to leave it out."""
    who: str = "the process that loads environments"
    doing: str = "it started"


@dataclass(frozen=True)
class Answer:
    """What came of the work: a result, or problems; with ``failed_at`` the one of a child that gave no answer."""

    result: Any = None
    problems: tuple[str, ...] = ()
    failed_at: Stage | None = None
    output: str = ""
    """The end of what was printed."""


@dataclass(frozen=True)
class Surveyed:
    """What a run's checks ask about an environment whose tasks are sound."""

    name: str
    evaluation_only: bool
    test_tasks: int
    first_chat: str | None
    """The id of a task whose prompt is chat messages."""
    demonstrates: bool
    """Whether it has demonstrations; False also if nobody asked."""
    overlong: Sequence[int] | None
    """Buffer, longest and longest free response in tokens, of an environment that reads a data set."""


def found(seconds: float = LOAD_SECONDS) -> Found:
    """Imports every environment there is."""
    answer, failures = _all_but_failing("find_all", {}, seconds)
    if answer.problems:
        raise ConfigError(answer.problems)
    raised = {name: (reason, trace) for name, reason, trace in answer.result["broken"]}
    broken = failures | {name: f"cannot be imported: {reason}" for name, (reason, _) in raised.items()}
    traces = {name: trace for name, (_, trace) in raised.items()}
    return Found(answer.result["environments"], dict(sorted(broken.items())), traces)


def inspected(name: str, options: Sequence[str], limit: int, seconds: float = LOAD_SECONDS) -> Answer:
    """The self-test of the environment ``name`` with ``options`` such as ``max_terms=6``.

    The result has a ``title`` and ``checks``: rows of name, verdict (None: there is nothing to check) and detail.
    """
    return _run_in_child("inspect", {"name": name, "options": list(options), "limit": limit}, seconds)


def surveyed(path: str | Path, seconds: float = LOAD_SECONDS, demonstrations: bool = False) -> list[Surveyed]:
    """The environments of the list at ``path``; one ``ConfigError`` carries all problems found."""
    answer, failures = _all_but_failing("survey", {"path": str(path), "demonstrations": demonstrations}, seconds)
    problems = [failures[entry] for entry in sorted(failures, key=int)] + list(answer.problems)
    if problems:
        raise ConfigError(problems)
    return [Surveyed(**row) for row in answer.result]


def _all_but_failing(work: str, arguments: Mapping[str, Any], seconds: float) -> tuple[Answer, dict[str, str]]:
    """The answer without the modules or entries that ended their child, and the problem of each of those."""
    failures: dict[str, str] = {}
    while True:
        answer = _run_in_child(work, {**arguments, "skip": list(failures)}, seconds)
        if answer.failed_at is None or not answer.failed_at.key or len(failures) >= MAX_FAILURES:
            return answer, failures
        failures[answer.failed_at.key] = answer.problems[0]


def _run_in_child(work: str, arguments: Mapping[str, Any], seconds: float) -> Answer:
    """The answer of ``loading_child.WORK[work](**arguments)``; each stage it reports may take ``seconds``."""
    ours, theirs = multiprocessing.Pipe()
    with ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "megatron_rl.environments.loading_child", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **importable()},
                start_new_session=True,  # what it starts is killed with it
            )
        child = _Child(process, ours)
        try:
            send(ours, {"work": work, "arguments": dict(arguments), "parent": os.getpid()})
            return child.answer(seconds)
        finally:
            child.end()


class _Failed(Exception):
    """The child gives no answer; says what it did, and what to do about it."""

    def __init__(self, what: str, advice: str = "mend it, or leave it out") -> None:
        super().__init__(what)
        self.advice = advice


@dataclass
class _Child:
    process: subprocess.Popen
    channel: Connection
    stage: Stage = field(default_factory=Stage)
    printed: int = 0
    tail: bytes = b""

    def answer(self, seconds: float) -> Answer:
        """Waits for it, stage after stage."""
        try:
            message = self._next_message(max(seconds, START_SECONDS))
            while "stage" in message:
                self.stage = Stage(**message["stage"])
                message = self._next_message(seconds)
            while self._read_output(0):
                pass
        except (_Failed, OSError, EOFError) as error:
            return self._failure(error if isinstance(error, _Failed) else _Failed(self._ended()))
        if "raised" in message:  # its last words are the traceback
            return self._failure(_Failed(message["raised"]), quote=False)
        return Answer(message.get("result"), tuple(message.get("problems", ())), output=self._output())

    def end(self) -> None:
        """Kills it with all it started, and reaps it."""
        kill_group(self.process.pid)
        self.process.stdout.close()
        self.process.wait()

    def _next_message(self, seconds: float) -> dict[str, Any]:
        start, told = time.monotonic(), False
        while not self.channel.poll(0):
            if self.process.poll() is not None and not self.channel.poll(0):
                raise EOFError  # a fork that it left behind may hold the channel open
            waited = time.monotonic() - start
            if waited > seconds:
                raise _Failed(f"took more than {seconds:g} s", "mend it, or raise --rl-environment-load-timeout")
            if waited > TELL_SECONDS and not told:
                told = True
                logger.info("%s: for %.0f s %s; that may take %g s", self.stage.who, waited, self.stage.doing, seconds)
            self._read_output(POLL_SECONDS)
        return receive(self.channel)

    def _read_output(self, seconds: float) -> bool:
        """Reads what is printed, or waits for a message meanwhile."""
        ready = wait([self.channel, self.process.stdout] if seconds else [self.process.stdout], seconds)
        if self.process.stdout not in ready:
            return False
        part = os.read(self.process.stdout.fileno(), 65536)
        self.printed += len(part)
        self.tail = (self.tail + part)[-KEPT_OUTPUT:]
        if self.printed > MAX_OUTPUT:
            raise _Failed(f"printed more than {MAX_OUTPUT // 2**20} MiB", "print less")
        if not part:
            time.sleep(seconds)  # closed by the child: always ready, and there is nothing to wait for
        return bool(part)

    def _output(self) -> str:
        return self.tail.decode("utf-8", errors="replace")

    def _failure(self, failed: _Failed, quote: bool = True) -> Answer:
        """The answer in the child's place."""
        with contextlib.suppress(_Failed):
            while self._read_output(0):
                pass
        said = f"; its last words: {one_line(self._output()[-200:])}" if quote and self.tail.strip() else ""
        line = f"{self.stage.who} {failed} while {self.stage.doing}; {failed.advice}{said}"
        return Answer(problems=(line,), failed_at=self.stage, output=self._output())

    def _ended(self) -> str:
        try:
            status = self.process.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed the files of its process"
        if status >= 0:
            return f"ended the process with status {status}"
        name = signal.Signals(-status).name
        return f"was killed by {name}" + (", likely for want of memory," if name == "SIGKILL" else "")
