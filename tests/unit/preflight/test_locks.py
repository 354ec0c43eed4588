"""Two starts of one run: the second is refused for as long as the first one lives, however that ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.run.preflight.machine import LOCK, lock
from tests.support.tiny import tiny_config


def _problems(**flags: object) -> list[str]:
    with contextlib.ExitStack() as held:
        return list(map(str, lock(tiny_config(**flags), held)))


@pytest.fixture
def other(tmp_path: Path) -> Iterator[int]:
    """A process that has locked the run directory ``tmp_path / "run"``; a fork of it lives on when it is killed."""
    (says, word), (waits, end) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(end)
        with contextlib.ExitStack() as held:
            lock(tiny_config(run_dir=tmp_path / "run"), held)
            os.fork()
            os.write(word, b".")
            os.read(waits, 1)
            os._exit(0)
    os.close(word)
    assert os.read(says, 1) + os.read(says, 1) == b".."
    yield pid
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for descriptor in (says, waits, end):  # upon which the fork ends
        os.close(descriptor)


def test_a_second_start_is_refused_until_the_first_is_killed(other: int, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (line,) = _problems(run_dir=run_dir)
    assert line == (
        f"--run-dir {run_dir} is in use by process {other} on {socket.gethostname()}; "
        "wait until that run has ended, stop it, or choose another directory"
    )
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    assert _problems(run_dir=run_dir) == []


def test_the_directory_of_checkpoints_is_locked_too_but_not_for_who_only_reads_it(other: int, tmp_path: Path) -> None:
    flags = {"run_dir": tmp_path / "another", "save": tmp_path / "run" / "checkpoints"}
    (line,) = _problems(**flags)
    assert line.startswith(f"--save {flags['save']} is in use by process {other}")
    reading = {"eval_only": True, "load": flags["save"], "num_layers": 2}
    assert _problems(**flags, **reading) == []


def test_a_start_that_has_ended_leaves_a_directory_that_holds_no_run(tmp_path: Path) -> None:
    from megatron_rl.metrics.rundir import check_usable

    assert _problems(run_dir=tmp_path / "run") == _problems(run_dir=tmp_path / "run") == []
    assert check_usable(tmp_path / "run", resume=False) == []


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setattr(logging.getLogger("megatron_rl"), "propagate", True)
    assert _problems(run_dir=tmp_path) == []
    assert caplog.messages[0].startswith(f"{tmp_path} is not locked ({os.strerror(number)})")
    assert (tmp_path / LOCK).read_bytes() == b""
