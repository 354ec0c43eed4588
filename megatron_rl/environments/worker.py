"""The process that grades. A template imports what is slow and is forked for every worker (``workers`` asks it to).

The template has one thread, so a fork copies no locks, and it is the parent of all workers, so that a dead one keeps
its process id until it is asked about. It ends when its control socket closes, and the workers with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
from collections.abc import Mapping
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

from megatron_rl.environments.limits import Limits, die_with_parent
from megatron_rl.environments.loader import find_environment
from megatron_rl.environments.results import failed, graded, judge, result_to_json
from megatron_rl.environments.wire import item_from_json, receive, send
from megatron_rl.json_text import dumps, loads
from megatron_rl.registry import GRADERS
from megatron_rl.types import GradeResult

OUT_OF_MEMORY = 99
"""Exit status of a worker whose memory ran out: what is left of it is not to be trusted."""


def main(descriptor: int, settings: str) -> None:
    """The template: a message with a socket on the control socket ``descriptor`` asks for a worker, one with a
    process id for the end of that worker. ``settings`` is JSON, written by ``workers``."""
    values = loads(settings)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an author's code may raise it
    for module in values["preload"]:
        with contextlib.suppress(ImportError):  # an environment that needs it says so with its own error
            importlib.import_module(module)
    for reference, options in values["environments"]:
        with contextlib.suppress(Exception, SystemExit):  # told by its first request
            _environment(reference, dumps(options))
    gc.freeze()  # a collection in a worker would otherwise copy every page of sympy
    children: set[int] = set()
    with socket.socket(fileno=descriptor) as control:
        while True:
            data, channels, _, _ = socket.recv_fds(control, 4096, 1)
            if not data:
                return
            if channels:
                answer: int | str = _fork(control, channels[0], Limits(**values["limits"]))
                children.add(answer)
            else:
                answer = _end(loads(data), children)
            control.sendall(dumps(answer).encode())


def _fork(control: socket.socket, descriptor: int, limits: Limits) -> int:
    """The process id of a new worker on the socket ``descriptor``."""
    template = os.getpid()
    pid = os.fork()
    if pid:
        os.close(descriptor)
        return pid
    try:
        die_with_parent(template)
        os.setpgid(0, 0)  # what it starts is killed with it
        control.close()
        nowhere = os.open(os.devnull, os.O_WRONLY)  # the log is a file, and to print to it would fail the grader
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        os.close(nowhere)
        limits.apply()
        with Connection(descriptor) as channel:
            _work(channel)
    finally:
        os._exit(0)  # never back into the template's loop


def _end(pid: int, children: set[int]) -> str:
    """Kills a worker with what it started and says how it ended: by this, or by what came before."""
    if pid not in children:
        return "ended with its template"
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    children.discard(pid)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return f"exited with status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def _work(channel: Connection) -> None:
    """Answers requests until the pool closes the channel."""
    send(channel, {"ready": True})
    with contextlib.suppress(EOFError):
        while True:
            send(channel, result_to_json(_answer(receive(channel))))
            gc.collect(0)


def _answer(request: Mapping[str, Any]) -> GradeResult:
    """The result of one request, whatever the grader does short of killing the process."""
    try:
        if "kind" in request:
            grade = GRADERS.get(request["kind"])(request["completion"], request["gold"])
            result = graded(grade.reward, grade.metrics, grade.status, grade.extracted)
        else:
            environment = _environment(request["environment"], dumps(request["options"]))
            result = judge(environment, item_from_json(request, "turn" if "turn" in request else "transcript"))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException as error:  # noqa: BLE001 - also KeyboardInterrupt, raised by an author's code
        return failed("environment_exception", f"{type(error).__name__}: {error}")
    if result.message.startswith("MemoryError"):
        os._exit(OUT_OF_MEMORY)
    return result


@lru_cache(maxsize=64)
def _environment(reference: str, options: str) -> Any:
    """Made once for each worker; a grader keeps nothing between two calls."""
    return find_environment(reference).from_options(loads(options))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
