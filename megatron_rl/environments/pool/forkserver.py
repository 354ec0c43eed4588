"""A small process with the slow imports done, which forks a worker for every request (``Forkserver`` asks).

It is single-threaded, so a fork copies no locks; it is the parent of all workers, so that a killed one is
reaped where its process id cannot meanwhile have become another's. It ends, with all workers, when the pool's
process ends: its control socket closes, or its parent changes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys

from megatron_rl.environments.pool import limits
from megatron_rl.environments.pool.worker import prepare, work
from megatron_rl.environments.readable import readable

POLL_SECONDS = 0.5


def main(descriptor: int, settings: str) -> None:
    """Serves the control socket ``descriptor``; ``settings`` is JSON written by ``Forkserver``."""
    values = json.loads(settings)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in values["preload"]:
        with contextlib.suppress(ImportError):  # an environment that needs it says so with its own error
            importlib.import_module(module)
    for reference, options in values["environments"]:
        prepare(reference, options)
    gc.freeze()  # a collection in a worker would otherwise copy every page of sympy
    children: set[int] = set()
    with socket.socket(fileno=descriptor) as control:
        try:
            _serve(control, values["parent"], limits.Limits(**values["limits"]), children)
        finally:
            for child in list(children):
                _end(child, children)


def _serve(control: socket.socket, parent: int, bounds: limits.Limits, children: set[int]) -> None:
    while os.getppid() == parent:
        if not readable(control, seconds=POLL_SECONDS):
            continue
        data, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
        if not data:
            return
        request = json.loads(data)
        if request["do"] == "spawn":
            answer = {"pid": _fork(control, descriptors[0], bounds)}
            children.add(answer["pid"])
        else:
            answer = {"status": _end(request["pid"], children)}
        control.sendall(json.dumps(answer).encode())


def _fork(control: socket.socket, descriptor: int, bounds: limits.Limits) -> int:
    """The process id of a new worker on the socket ``descriptor``."""
    server = os.getpid()
    pid = os.fork()
    if pid:
        os.close(descriptor)
        return pid
    try:
        limits.die_with_parent(server)
        os.setpgid(0, 0)
        control.close()
        _discard_output()
        limits.apply(bounds)
        with socket.socket(fileno=descriptor) as channel:
            work(channel)
    finally:
        os._exit(0)  # never back into the server's loop


def _discard_output() -> None:
    """The server's log is a file, and a print that cannot write to it would fail the grader."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _end(pid: int, children: set[int]) -> int:
    """Kills a worker with what it started and returns how it ended, as ``os.waitpid`` says it."""
    if pid not in children:
        return 0
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    children.discard(pid)
    return os.waitpid(pid, 0)[1]


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
