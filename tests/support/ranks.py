"""Run a function on several ranks, each in a process of its own, and collect what they return."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.forks import REPOSITORY, Fork


def free_port() -> int:
    """A loopback port nobody has right now.

    Below 32768, where the kernel takes no port of its own accord: until the port is used, which takes seconds, no
    connection that somebody opens can get it.
    """
    draw = random.SystemRandom()
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", draw.randrange(10_000, 32_768)))
            return probe.getsockname()[1]


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would set."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",  # a rank that crashes says where
        "PYTHONPATH": str(REPOSITORY),
    }


def run_ranks(
    function: str, world_size: int, timeout: float = 600.0, imported_under: Mapping[str, str] | None = None,
    **arguments: Any,
) -> list[Any]:
    """Call ``package.module:function(**arguments)`` on every rank; JSON in, JSON out, in rank order.

    The function runs with the environment torchrun would give it and initialises what it needs.
    A failure shows the rank's output. ``imported_under``: see `Fork`.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(world_size):
            answer, log = Path(folder) / f"{rank}.json", Path(folder) / f"{rank}.log"
            given = [function, str(answer), json.dumps(arguments), str(max(timeout - 5, 1))]
            with log.open("wb") as output:
                command = ["-m", "tests.support.ranks", *given]
                environment = rank_environment(rank, world_size, port)
                process = Fork(command, environment, output, output, rank, imported_under=imported_under)
            started.append((process, answer, log))
        try:
            for process, _, _ in started:
                process.wait(timeout)
            codes = [process.returncode for process, _, _ in started]
            if any(codes):
                output = "\n".join(log.read_text()[-6000:] for _, _, log in started)
                raise AssertionError(f"{function} failed, exit codes {codes}:\n{output}")
        except subprocess.TimeoutExpired as error:
            output = "\n".join(log.read_text()[-3000:] for _, _, log in started)
            raise AssertionError(f"{function} hangs:\n{output}") from error
        finally:
            for process, _, _ in started:
                process.kill()
                process.wait()
        return [json.loads(answer.read_text()) for _, answer, _ in started]


@contextlib.contextmanager
def joined() -> Iterator[tuple[int, int]]:
    """In a function of `run_ranks` that needs torch's process group alone: rank and number of ranks."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def _main() -> None:
    import faulthandler
    import importlib

    target, answer, arguments, seconds = sys.argv[1:]
    faulthandler.dump_traceback_later(float(seconds))  # where a rank that hangs stands
    module, name = target.split(":")
    result = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    Path(answer).write_text(json.dumps(result))


if __name__ == "__main__":
    _main()
