"""`megatron-rl train --nproc 2`: ranks, signals and exit codes without torchrun's banner, report and traceback."""

from __future__ import annotations

import shlex
import signal
import time

import pytest

from tests.support.launches import launched
from tests.support.runs import facts_of, rows_of, run

SLOW = "tests.support.e2e_environments:Slow"
TORCHRUNS_WORDS = ("torchrun", "elastic", "Traceback", "Root Cause", "exitcode", "OMP_NUM_THREADS")


def _foreign(output: str) -> list[str]:
    return [word for word in TORCHRUNS_WORDS if word in output]


def _slow(workshop, seconds: float):
    return workshop.environments("slow", [{"environment": SLOW, "args": {"seconds": seconds}}])


@pytest.mark.long  # below are two ranks that train, save and leave their command
def test_two_ranks_train_as_under_torchrun(workshop):
    run(workshop.rl("plain"), ranks=2).check()
    argv, run_dir = workshop.rl("launched"), workshop.run_dir("launched")
    with launched(argv, run_dir, ranks=2, by_itself=True) as launch:
        assert launch.wait() == 0, launch.output[-3000:]
        assert launch.leftovers() == []
    assert _foreign(launch.output) == []
    assert rows_of(run_dir) == rows_of(workshop.run_dir("plain"))


def test_a_wrong_configuration_is_two_lines_and_no_rank(workshop):
    argv = workshop.rl("wrong", langrl_env_config=workshop.folder / "nowhere.yaml")
    with launched(argv, workshop.run_dir("wrong"), ranks=2, by_itself=True) as launch:
        assert launch.wait() == 2
    head, line = launch.output.splitlines()
    assert head == "1 problem(s) in the configuration:"
    assert "the environment list" in line and "cannot be read" in line


def test_ctrl_c_saves_the_exit_code_is_0_and_the_command_can_be_typed_again(workshop):
    run_dir = workshop.run_dir("stopped")
    argv = workshop.rl("stopped", train_iters=4000, langrl_env_config=_slow(workshop, 0.05))
    with launched(argv, run_dir, ranks=2, by_itself=True) as launch:
        launch.wait_for_step(2)
        launch.signal_group(signal.SIGINT)
        assert launch.wait() == 0, launch.output[-3000:]
        assert launch.leftovers() == []
    assert _foreign(launch.output) == []
    assert "SIGINT: the ranks finish and save" in launch.output
    assert facts_of(run_dir)["status"] == "stopped"
    done = rows_of(run_dir)[-1]["step"]
    assert (run_dir / "checkpoints" / "latest").read_text().strip() == f"step_{done:07d}"
    words = shlex.split((run_dir / "command.txt").read_text())
    assert words == ["megatron-rl", "train", "--nproc=2", "--max-restarts=0", *argv]


@pytest.mark.long  # test_stopping.py has it of one rank, without a launcher
def test_a_second_ctrl_c_ends_the_ranks_at_once(workshop):
    run_dir, started = workshop.run_dir("twice"), workshop.folder / "twice_started"
    slow = workshop.environments("twice", [{"environment": SLOW, "args": {"seconds": 2, "started": str(started)}}])
    argv = workshop.rl("twice", langrl_env_config=slow, exit_grace_seconds=600)
    with launched(argv, run_dir, ranks=2, by_itself=True) as launch:
        launch.wait_until(started.exists, "the first grade")
        launch.signal_group(signal.SIGINT)
        time.sleep(1.5)  # within a second it would be an echo of the first one
        launch.signal_group(signal.SIGINT)
        assert launch.wait() == 130, launch.output[-3000:]
        assert launch.leftovers() == []
    assert _foreign(launch.output) == []


@pytest.mark.long  # test_out_of_memory.py has a rank that follows another, unit/cli/test_launch.py the exit code
def test_a_killed_rank_is_named_and_takes_the_others_along(workshop):
    run_dir = workshop.run_dir("killed")
    argv = workshop.rl("killed", train_iters=4000, langrl_env_config=_slow(workshop, 0.05))
    with launched(argv, run_dir, ranks=2, by_itself=True) as launch:
        launch.wait_for_step(1)
        launch.signal_rank(1, signal.SIGKILL)
        assert launch.wait() == 128 + signal.SIGKILL, launch.output[-3000:]
        assert launch.leftovers() == []
    assert _foreign(launch.output) == []
    assert "rank 1 was ended by SIGKILL" in launch.output
    assert facts_of(run_dir)["status"] == "failed"


@pytest.mark.long
def test_a_killed_launcher_takes_its_ranks_along_and_the_same_command_goes_on(workshop):
    run_dir = workshop.run_dir("orphans")
    slow = _slow(workshop, 0.05)
    argv = workshop.rl("orphans", train_iters=8, langrl_env_config=slow, save_interval=2, resume=True)
    with launched(argv, run_dir, ranks=2, by_itself=True) as launch:
        launch.wait_for_step(3)
        launch.signal(signal.SIGKILL)
        launch.wait()
        assert launch.leftovers() == []
    with launched(argv, run_dir, ranks=2, by_itself=True) as launch:
        assert launch.wait() == 0, launch.output[-3000:]
    assert "(step 2)" in launch.output
    assert rows_of(run_dir)[-1]["step"] == 8
