"""Runs one piece of work in a child process, which may hang, exit, crash or print without end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.environments.pool.channel import receive, send
from megatron_rl.environments.readable import readable
from megatron_rl.errors import one_line

LOAD_SECONDS = 300.0
"""Default deadline of each stage. The published DAPO-Math-17k takes half a minute, after its download."""
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
class Stage:
    """What a child is about to do; if it does not come back, this is what it did."""

    key: str = ""
    """The entry or the module, in the caller's words; the next child is told to leave it out."""
    who: str = "the process that loads environments"
    doing: str = "it started"


@dataclass(frozen=True)
class Answer:
    """What came of the work: a result, or problems with the input, or how the child failed."""

    result: Any = None
    problems: tuple[str, ...] = ()
    failed_at: Stage | None = None
    failure: str = ""
    """One line, set with ``failed_at``."""
    output: str = ""
    """The end of what was printed."""


def run_in_child(work: str, arguments: Mapping[str, Any], seconds: float) -> Answer:
    """The answer of ``stages.WORK[work](**arguments)``; each stage it reports may take ``seconds``."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            command = [sys.executable, "-m", "megatron_rl.environments.loading.child", str(theirs.fileno())]
            paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": paths},
                start_new_session=True,  # what it starts is killed with it
            )
        child = _Child(process, ours)
        try:
            send(ours, {"work": work, "arguments": dict(arguments), "parent": os.getpid()}, seconds)
            return child.answer(seconds)
        except OSError:
            return child.failed("ended")
        finally:
            child.end()


@dataclass
class _Child:
    process: subprocess.Popen
    channel: socket.socket
    stage: Stage = field(default_factory=Stage)
    printed: int = 0
    tail: bytes = b""

    def answer(self, seconds: float) -> Answer:
        """Waits for it, stage after stage."""
        while True:
            try:
                started = self.stage != Stage()
                message = self._next_message(seconds if started else max(seconds, START_SECONDS))
            except TimeoutError:
                advice = "mend it, or raise --rl-environment-load-timeout"
                return self.failed(f"took more than {seconds:g} s", advice)
            except _Flood:
                return self.failed(f"printed more than {MAX_OUTPUT // 2**20} MiB", "print less")
            except OSError:
                return self.failed(self._ended())
            if "stage" in message:
                self.stage = Stage(**message["stage"])
            elif "raised" in message:
                return self.failed(message["raised"], quote=False)  # its last words are the traceback
            else:
                self._drain()
                return Answer(message.get("result"), tuple(message.get("problems", ())), output=self._output())

    def failed(self, what: str, advice: str = "mend it, or leave it out", quote: bool = True) -> Answer:
        """The answer in the child's place."""
        with contextlib.suppress(_Flood):
            self._drain()
        said = f"; its last words: {one_line(self._output()[-200:])}" if quote and self.tail.strip() else ""
        line = f"{self.stage.who} {what} while {self.stage.doing}; {advice}{said}"
        return Answer(failed_at=self.stage, failure=line, output=self._output())

    def end(self) -> None:
        """Kills it with all it started, and reaps it."""
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.process.pid, signal.SIGKILL)
        self.process.stdout.close()
        self.process.wait()

    def _next_message(self, seconds: float) -> dict[str, Any]:
        """``TimeoutError``, ``_Flood``, or ``OSError`` for a child that ended."""
        start, told = time.monotonic(), False
        while True:
            ready = readable(self.channel, self.process.stdout, seconds=POLL_SECONDS)
            waited = time.monotonic() - start
            if self.channel in ready:
                return receive(self.channel, max(seconds - waited, 1.0))
            if self.process.stdout in ready:
                self._read_output()
            # a fork that it left behind may hold the channel open
            if self.process.poll() is not None and not readable(self.channel, seconds=0):
                raise ConnectionError
            if waited > seconds:
                raise TimeoutError
            if waited > TELL_SECONDS and not told:
                told = True
                logger.info("%s: for %.0f s %s; that may take %g s", self.stage.who, waited, self.stage.doing, seconds)

    def _read_output(self) -> bool:
        part = os.read(self.process.stdout.fileno(), 65536)
        self.printed += len(part)
        self.tail = (self.tail + part)[-KEPT_OUTPUT:]
        if self.printed > MAX_OUTPUT:
            raise _Flood
        if not part:
            time.sleep(POLL_SECONDS)  # closed by the child: always ready, and there is nothing to wait for
        return bool(part)

    def _drain(self) -> None:
        """What was printed before the answer and has not been read yet."""
        while readable(self.process.stdout, seconds=0) and self._read_output():
            pass

    def _output(self) -> str:
        return self.tail.decode("utf-8", errors="replace")

    def _ended(self) -> str:
        try:
            status = self.process.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed the files of its process"
        if status >= 0:
            return f"ended the process with status {status}"
        name = signal.Signals(-status).name
        return f"was killed by {name}" + (", likely for want of memory," if name == "SIGKILL" else "")


class _Flood(Exception):
    """More output than is read."""
