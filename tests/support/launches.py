"""A run that is started as a user starts it, watched from outside and sent signals."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.support.forks import Fork
from tests.support.ranks import REPOSITORY, free_port, rank_environment
from tests.support.runs import rows_of

PATIENCE_S = 300.0
"""Generous: the machine is shared. Every wait ends as soon as what it waits for is there."""


class Launch:
    """`train_rl.py` under torchrun, or alone with ``ranks`` 0; or `megatron-rl`, which launches by itself."""

    def __init__(
        self, argv: Sequence[str], run_dir: Path, ranks: int = 0, restarts: int = 0, by_itself: bool = False,
        command: str = "train",
    ) -> None:  # fmt: skip
        self.run_dir = run_dir
        self._log = run_dir.with_name(f"{run_dir.name}.{time.monotonic_ns()}.log")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        scratch = run_dir.with_name("tmp")  # torchrun leaves a folder behind, and so does who is killed
        scratch.mkdir(exist_ok=True)
        launcher, program = [sys.executable], ["train_rl.py"]
        if by_itself:
            program = ["-m", "megatron_rl.cli", command, f"--nproc={ranks}", f"--max-restarts={restarts}"]
        elif ranks:
            launcher += ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}"]
            launcher += [f"--max-restarts={restarts}"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*launcher, *program, *argv],
                cwd=REPOSITORY,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(scratch)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """What launcher and ranks have written so far."""
        return self._log.read_text(errors="replace")

    def wait(self) -> int:
        """The exit code of the launcher."""
        try:
            return self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"the launch hangs:\n{self.output[-6000:]}") from error

    def poll(self) -> int | None:
        """The exit code of the launcher, None as long as it runs."""
        return self._process.poll()

    def wait_for_step(self, step: int) -> None:
        """Until metrics.jsonl has the row of ``step``."""
        self.wait_until(lambda: _last_step(self.run_dir) >= step, f"step {step}")

    def wait_until(self, reached: Callable[[], bool], what: str) -> None:
        """Until ``reached`` answers True; fails when the run ends before."""
        deadline = time.monotonic() + PATIENCE_S
        while not reached():
            ended = self.poll()
            assert ended is None, f"ended with {ended} before {what}:\n{self.output[-6000:]}"
            assert time.monotonic() < deadline, f"{what} is never reached:\n{self.output[-6000:]}"
            time.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        """To the launcher alone, as ``kill`` does."""
        self._process.send_signal(number)

    def signal_group(self, number: signal.Signals) -> None:
        """To the launcher's process group, as a terminal does on Ctrl-C."""
        os.killpg(self._process.pid, number)

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        """To one rank's process."""
        for process in psutil.Process(self._process.pid).children():
            if process.environ().get("RANK") == str(rank):
                process.send_signal(number)
                return
        raise AssertionError(f"no process of rank {rank}")

    def processes(self) -> list[psutil.Process]:
        """Every living process whose command names the run's directory: ranks and environment servers."""
        return [process for process in psutil.process_iter() if str(self.run_dir) in _command_of(process)]

    def server(self) -> psutil.Process:
        """The environment server."""
        return next(p for p in self.processes() if "megatron_rl.environments" in p.cmdline())

    def leftovers(self) -> list[str]:
        """Commands of processes that outlive the launcher; they get a moment to notice."""
        deadline = time.monotonic() + 10
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        return [_command_of(process) for process in self.processes()]

    def close(self) -> None:
        """Kill whatever is left of it."""
        if self.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


class ForkedLaunch(Launch):
    """The ranks alone, in forks: no launcher, and nothing is imported again. For what is asked of ranks and servers."""

    def __init__(
        self, argv: Sequence[str], run_dir: Path, ranks: int, program: Sequence[str] = ("train_rl.py",)
    ) -> None:
        self.run_dir = run_dir
        self._log = run_dir.with_name(f"{run_dir.name}.{time.monotonic_ns()}.log")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        port = free_port()
        with self._log.open("ab") as log:
            self._forks = [
                Fork([*program, *map(str, argv)], rank_environment(rank, ranks, port), log, log, rank)
                for rank in range(ranks)
            ]

    def wait(self) -> int:
        """0, or the exit code of a rank that failed."""
        codes = []
        for fork in self._forks:
            try:
                codes.append(fork.wait(PATIENCE_S))
            except subprocess.TimeoutExpired as error:
                raise AssertionError(f"a rank hangs:\n{self.output[-6000:]}") from error
        return next(filter(None, codes), 0)

    def poll(self) -> int | None:
        """As `wait` once all have ended, before that None."""
        return None if None in [fork.poll() for fork in self._forks] else self.wait()

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        """To one rank's process."""
        os.kill(self._forks[rank].pid, number)

    def close(self) -> None:
        """Kill whatever is left of it."""
        for fork in self._forks:
            fork.kill()
            fork.wait()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@contextlib.contextmanager
def launched(
    argv: Sequence[str], run_dir: Path, ranks: int = 0, restarts: int = 0, by_itself: bool = False,
    command: str = "train",
) -> Iterator[Launch]:  # fmt: skip
    """A launch that leaves nothing behind, whatever the test does."""
    with contextlib.closing(Launch(argv, run_dir, ranks, restarts, by_itself, command)) as launch:
        yield launch


@contextlib.contextmanager
def forked(
    argv: Sequence[str], run_dir: Path, ranks: int = 1, program: Sequence[str] = ("train_rl.py",)
) -> Iterator[Launch]:
    """The same of ranks without a launcher."""
    with contextlib.closing(ForkedLaunch(argv, run_dir, ranks, program)) as launch:
        yield launch


def _last_step(run_dir: Path) -> int:
    try:
        rows: list[dict[str, Any]] = rows_of(run_dir)
    except (OSError, ValueError):  # not there yet, or a line is being written
        return -1
    return rows[-1]["step"] if rows else -1


def _command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) if process.status() != psutil.STATUS_ZOMBIE else ""
    except psutil.Error:
        return ""
