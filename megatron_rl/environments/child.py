"""Child processes for author's code: how they start, what they can import, how they are watched and how they end.

A module may hang, exit, crash or print without end: in a child (`run_in_child`, answered by `answer_parent`) that costs
its own answer and no other.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from megatron_rl.environments.loader import reason_of
from megatron_rl.environments.wire import receive, send
from megatron_rl.errors import ConfigError, one_line

LOAD_SECONDS = 300.0
"""Default deadline for an import, a set-up or a split's tasks. The published DAPO-Math-17k takes half a minute, after
its download."""
HARNESS_PROCESSES = 64
"""Default number of samples of harnesses that run at once on a node; most of them wait for the model."""
CHILDREN = "/proc/self/task/{}/children"
"""Of a process with one thread; kernels built without CONFIG_PROC_CHILDREN have no such file."""
MAX_FAILURES = 10
"""Children that may fail before the rest is not looked at: each may take a whole deadline."""
MAX_OUTPUT = 16 * 2**20
"""Bytes that a watched child may print; one printed 800 MB to the terminal of ``--check``."""
KEPT_OUTPUT = 4_000
"""Bytes of it that are kept, from the end."""
START_SECONDS = 60.0
"""Shortest deadline of a watched child's own start, whatever its stages are given."""
REPORT_SECONDS = 15.0
"""A stage that takes longer is reported in the log."""
POLL_SECONDS = 0.05
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

Report = Callable[[str, str, str], None]
"""Told, in a watched child, the key of what comes next, who it is and what it does, should it not come back."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """The result of the work in a watched child, or its problems."""

    result: Any = None
    problems: tuple[str, ...] = ()
    failed_at: str = ""
    """The key of the stage at which the child ended, if at one; the next child leaves it out."""
    output: str = ""
    """The end of what was printed."""


def start_child(module: str, environment: Mapping[str, str], **streams: Any) -> tuple[subprocess.Popen, Connection]:
    """Start a process that runs ``module``, which finds its ``parent_channel``; return the other end, too."""
    ours, theirs = multiprocessing.Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**environment, **importable()},
            # Ctrl-C and a launcher's SIGTERM are for the trainer; and what the child starts is killed with it
            start_new_session=True,
            **streams,
        )
    return process, ours


def parent_channel() -> Connection:
    """Return the channel that a child was started with."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    return Connection(descriptor)


def importable() -> dict[str, str]:
    """Return the variable with which a child imports what this process can, wherever it was started from."""
    return {"PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)}


def die_with_parent(parent: int) -> None:
    """Have this process killed as soon as the thread of ``parent`` that started it ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def adopt_orphans() -> None:
    """Make orphans of this process's descendants its children, instead of the machine's first process's."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_orphans(known: Collection[int]) -> None:
    """Kills the children of this process that are not ``known``, with their descendants: a killed worker's browser or
    daemon, which has a process group of its own. For a process that adopts orphans."""
    while orphans := [pid for pid in _children() if pid not in known]:
        for pid in orphans:
            kill_group(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    """psutil reads the status of every process of the machine, 2 ms for each hundred, and this is asked for every
    sample of a harness."""
    try:
        return [int(pid) for pid in Path(CHILDREN.format(os.getpid())).read_text().split()]
    except FileNotFoundError:
        return [child.pid for child in psutil.Process().children()]


def kill_group(pid: int) -> None:
    """Kills the process with what it started."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def run_in_children(
    program: str, work: str, arguments: Mapping[str, Any], seconds: float
) -> tuple[Answer, dict[str, str]]:
    """Return the answer without the stages that ended their child, and the problem of each of those by its key."""
    failures: dict[str, str] = {}
    while True:
        answer = run_in_child(program, work, {**arguments, "skip": list(failures)}, seconds)
        if not answer.failed_at or len(failures) >= MAX_FAILURES:
            return answer, failures
        failures[answer.failed_at] = answer.problems[0]


def run_in_child(program: str, work: str, arguments: Mapping[str, Any], seconds: float) -> Answer:
    """Return what ``work(**arguments)`` of the module ``program`` answers; each stage may take ``seconds``."""
    key, who, doing, limit = "", "the process that loads modules", "it started", max(seconds, START_SECONDS)
    with tempfile.TemporaryFile() as printed:
        process, channel = start_child(program, os.environ, stdout=printed, stderr=subprocess.STDOUT)
        try:
            send(channel, {"work": work, "arguments": dict(arguments), "parent": os.getpid()})
            while "stage" in (message := _next_message(process, channel, printed.fileno(), limit, f"{who}: {doing}")):
                (key, who, doing), limit = message["stage"], seconds
        except (OSError, EOFError):
            message = {"failed": _how_it_ended(process)}
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
    what, advice = message.get("raised") or message["failed"], message.get("advice", "fix it, or leave it out")
    return Answer(problems=(f"{who} {what} while {doing}; {advice}{said}",), failed_at=key, output=output)


def _next_message(
    process: subprocess.Popen, channel: Connection, printed: int, seconds: float, stage: str
) -> dict[str, Any]:
    """What the child says next, or ``failed`` where it takes or prints too much; ``EOFError`` when it has ended."""
    start, is_reported = time.monotonic(), False
    while not channel.poll(POLL_SECONDS):
        if process.poll() is not None and not channel.poll(0):
            raise EOFError  # a fork that it left behind may hold the channel open
        if os.fstat(printed).st_size > MAX_OUTPUT:
            return {"failed": f"printed more than {MAX_OUTPUT // 2**20} MiB", "advice": "print less"}
        waited = time.monotonic() - start
        if waited > seconds:
            advice = "fix it, or raise --rl-environment-load-timeout"
            return {"failed": f"took more than {seconds:g} s", "advice": advice}
        if waited > REPORT_SECONDS and not is_reported:
            is_reported = True
            logger.info("%s (for %.0f s; it may take %g s)", stage, waited, seconds)
    return receive(channel)


def _how_it_ended(process: subprocess.Popen) -> str:
    try:
        status = process.wait(0.2)
    except subprocess.TimeoutExpired:
        return "closed the files of its process"
    if status >= 0:
        return f"ended the process with status {status}"
    name = signal.Signals(-status).name
    return f"was killed by {name}" + (", likely for want of memory," if name == "SIGKILL" else "")


def answer_parent(works: Mapping[str, Callable[..., Any]]) -> None:
    """Do, in the child of `run_in_child`, the one of ``works`` that is asked for, and end whatever still runs then."""
    channel = parent_channel()
    request = receive(channel)
    die_with_parent(request["parent"])
    adopt_orphans()
    _bound_memory()

    def report(key: str, who: str, doing: str) -> None:
        send(channel, {"stage": [key, who, doing]})

    try:
        answer = {"result": works[request["work"]](report, **request["arguments"])}
    except ConfigError as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        answer = {"problems": error.lines}
    except BaseException as error:  # noqa: BLE001 - an author's module may raise anything
        traceback.print_exc()
        answer = {"raised": f"raised {reason_of(error)}"}
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed or replaced by a module
        sys.stdout.flush()
        sys.stderr.flush()
    kill_orphans(())  # such as a tool server of the self-test
    send(channel, answer)
    os._exit(0)  # threads and exit handlers of the modules have no say


def _bound_memory() -> None:
    """Half of the machine's, and the first to go when the kernel runs short: the caller has work to keep."""
    half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or half < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (half, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
