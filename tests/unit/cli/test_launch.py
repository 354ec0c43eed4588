"""What the end of a rank is to whoever typed the command."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import psutil
import pytest
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron_rl.cli import launch
from megatron_rl.cli.options import Ranks
from tests.support.forks import run_python

RANK = "megatron_rl.cli.launch"
LAUNCHER = f"""
import os, subprocess, sys
words = [sys.executable, "-m", "{RANK}", str(os.getpid()), "builtins:input", "ready"]
print(subprocess.Popen(words).pid, flush=True)
input()
"""
TORCHRUN = """
import os, signal, time
from megatron_rl import main
reader, writer = os.pipe()
pid = os.fork()
if pid == 0:
    os.environ |= {"TORCHELASTIC_RUN_ID": "1", "LOCAL_RANK": "0"}
    main._run = lambda *_: (os.write(writer, b"."), time.sleep(60))
    main.main(["train_rl.py"])
os.read(reader, 1)
print(pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
"""A rank that runs, and a launcher that is killed then."""
REFUSED = """
import gc
from megatron_rl.main import main
collect, seen = gc.collect, []
gc.collect = lambda *_: seen.append(gc.isenabled()) or collect()
print(main(["train_rl.py"]), False in seen, gc.isenabled())
"""
"""The exit code; whether garbage was collected before collections came by themselves; whether they do again."""


@pytest.mark.parametrize(
    ("exitcode", "stopped", "expected"),
    [(2, False, 2), (3, True, 3), (-9, False, 137), (-9, True, 137), (-15, False, 143), (-15, True, 0)],
    ids=["its own", "its own, asked to stop", "killed", "killed, asked to stop", "somebody's SIGTERM", "our SIGTERM"],
)
def test_the_exit_code(
    exitcode: int, stopped: bool, expected: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that starts has no handler yet: our SIGTERM ends it, as was asked."""

    def fail(arguments: object) -> None:
        raise ChildFailedError("rank", {1: ProcessFailure(1, 77, exitcode, "nowhere")})

    told = {77} if stopped else set()
    monkeypatch.setattr(run, "run", fail)
    monkeypatch.setattr(launch, "forwarding_signals", lambda: contextlib.nullcontext(told))
    assert launch.launch(Ranks(nproc=2), "module:function", [], ["megatron-rl"]) == expected
    assert ("rank 1 was ended by SIGKILL" in caplog.text) == (exitcode == -9)


def test_a_rank_ends_with_a_launcher_that_is_killed() -> None:
    reader, writer = os.pipe()  # the rank waits for a line that nobody writes
    with subprocess.Popen([sys.executable, "-c", LAUNCHER], stdin=reader, stdout=subprocess.PIPE) as launcher:
        rank = psutil.Process(int(launcher.stdout.readline()))
        prompt = launcher.stdout.read(len("['ready']"))
        launcher.kill()
    os.close(reader)
    assert prompt == b"['ready']"
    rank.wait(20)
    os.close(writer)


def test_a_rank_whose_launcher_has_ended_before_it_could_look_ends_too() -> None:
    words = [sys.executable, "-m", RANK, "1", "builtins:print", "went on"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")


def test_a_rank_ends_with_a_torchrun_that_is_killed() -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
        psutil.Process(int(run_python("-c", TORCHRUN).stdout)).wait(20)


def test_a_refusal_leaves_no_garbage_to_other_threads() -> None:
    """Process groups that another thread collects at the exit end the process by SIGABRT."""
    assert run_python("-c", REFUSED).stdout == "2 True True\n"
