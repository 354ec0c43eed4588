"""Signals and kills: what is finished is saved, nothing is left running, and a resume goes on from there."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import time
from pathlib import Path

import pytest

from megatron_rl.environments.client import EnvironmentClient
from megatron_rl.run.preflight.machine import lock
from tests.support.checkpoints import differences, state_of
from tests.support.launches import forked, launched
from tests.support.runs import facts_of, rows_of, run, run_many
from tests.support.tiny import tiny_config

SLOW = "tests.support.e2e_environments:Slow"
STEPS = 12
LAST = Path("checkpoints") / f"step_{STEPS:07d}"


def _environments(workshop, name: str, seconds: float, **options) -> Path:
    """The same tasks and rewards, graded as slowly as a test needs it."""
    entry = {"environment": SLOW, "args": {"seconds": seconds, **options}}
    return workshop.environments(name, [entry])


@pytest.fixture(scope="module")
def whole(workshop) -> Path:
    """The run that nobody disturbs, on two ranks."""
    environments = _environments(workshop, "undisturbed", seconds=0.0)
    run(
        workshop.rl("undisturbed", train_iters=STEPS, langrl_env_config=environments, use_distributed_optimizer=True),
        ranks=2,
    ).check()
    return workshop.run_dir("undisturbed")


def test_a_run_stopped_in_every_way_and_resumed_is_the_undisturbed_one(workshop, whole, with_long):
    run_dir, slow = workshop.run_dir("disturbed"), _environments(workshop, "slow", seconds=0.05)
    flags = {"train_iters": STEPS, "langrl_env_config": slow, "use_distributed_optimizer": True}
    stops = {
        "SIGTERM to torchrun": lambda launch: launch.signal(signal.SIGTERM),
        "Ctrl-C in the terminal": lambda launch: launch.signal_group(signal.SIGINT),
        "SIGTERM to one rank": lambda launch: launch.signal_rank(1, signal.SIGTERM),
    }
    if not with_long:  # test_command.py has it under the command's launcher
        del stops["Ctrl-C in the terminal"]
    reached = 0
    for what, stop in stops.items():
        start = forked if "one rank" in what else launched
        with start(workshop.rl("disturbed", **flags, resume=reached > 0), run_dir, ranks=2) as launch:
            launch.wait_for_step(reached + 2)
            stop(launch)
            code = launch.wait()
            assert launch.leftovers() == [], what
            ours = launch.output if code == 0 else launch.output.partition("a traceback of its own")[0]
            assert "Traceback" not in ours, what
            assert "restart" not in launch.output, f"{what}: the environment server got the signal too"
        assert facts_of(run_dir)["status"] == "stopped", what
        if what == "SIGTERM to one rank":
            assert code == 0, launch.output[-3000:]
        done = rows_of(run_dir)[-1]["step"]
        saved = (run_dir / "checkpoints" / "latest").read_text().strip()
        assert saved == f"step_{done:07d}", f"{what}: the finished steps were not saved"
        assert reached < done < STEPS, what
        reached = done
    _environments(workshop, "slow", seconds=0.0)
    run(workshop.rl("disturbed", **flags, resume=True), ranks=2).check()
    assert facts_of(run_dir)["status"] == "finished"
    assert rows_of(run_dir) == rows_of(whole)
    assert differences(run_dir / LAST, whole / LAST) == []


@pytest.mark.long  # test_command.py kills a rank under the command's launcher, test_kills.py resumes
def test_a_killed_rank_takes_the_others_along_and_the_last_save_is_resumed(workshop, whole):
    run_dir, slow = workshop.run_dir("killed"), _environments(workshop, "killed", seconds=0.05)
    flags = {"train_iters": STEPS, "langrl_env_config": slow, "use_distributed_optimizer": True, "save_interval": 2}
    with launched(workshop.rl("killed", **flags), run_dir, ranks=2) as launch:
        launch.wait_for_step(3)
        launch.signal_rank(1, signal.SIGKILL)
        assert launch.wait() != 0
        assert launch.leftovers() == []
        ours = launch.output.partition("what torchrun writes below is its own report of exit code 1")[0]
        assert "another rank has ended" in ours
        assert "Traceback" not in ours
    assert facts_of(run_dir)["status"] == "failed"
    _environments(workshop, "killed", seconds=0.0)
    outcome = run(workshop.rl("killed", **flags, resume=True), ranks=2).check()
    assert "resumed from" in outcome.output
    assert rows_of(run_dir) == rows_of(whole)
    assert differences(run_dir / LAST, whole / LAST) == []


@pytest.mark.long
def test_a_rank_that_is_stopped_for_good_ends_the_job(workshop):
    """The others say where they wait for it, and end within `--distributed-timeout-minutes`; torchrun ends the rank."""
    run_dir = workshop.run_dir("hung")
    with launched(workshop.rl("hung", train_iters=4000, distributed_timeout_minutes=1), run_dir, ranks=2) as launch:
        launch.wait_for_step(3)
        launch.signal_rank(1, signal.SIGSTOP)
        assert launch.wait() == 1
        assert launch.leftovers() == []
        assert "no progress for 30 s in" in launch.output
        assert "no progress for 60 s in" in launch.output
        assert "< train (run/training.py:" in launch.output
    assert facts_of(run_dir)["status"] == "failed"
    assert "no progress for 60 s" in facts_of(run_dir)["error"]


@pytest.mark.long
def test_a_rank_that_is_stopped_for_a_while_costs_nothing(workshop, whole):
    environments = _environments(workshop, "paused", seconds=0.0)
    flags = {"train_iters": STEPS, "langrl_env_config": environments, "use_distributed_optimizer": True}
    run_dir = workshop.run_dir("paused")
    with launched(workshop.rl("paused", **flags), run_dir, ranks=2) as launch:
        for step, rank in ((2, 0), (5, 1)):
            launch.wait_for_step(step)
            launch.signal_rank(rank, signal.SIGSTOP)
            time.sleep(15)
            launch.signal_rank(rank, signal.SIGCONT)
        assert launch.wait() == 0, launch.output[-3000:]
    assert rows_of(run_dir) == rows_of(whole)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_torchrun_while_the_ranks_start_is_a_clean_stop(workshop, number):
    name = f"starting_{number.name}"
    with launched(workshop.rl(name), workshop.run_dir(name), ranks=2) as launch:
        launch.wait_until(lambda: "--hidden-size" in launch.output, "the start of rank 0")
        launch.signal_group(number)
        assert launch.wait() == 1  # torchrun's own
        assert launch.leftovers() == []
        ours = launch.output.partition("a traceback of its own")[0]
        assert f"stopped by {number.name} while it started: there is nothing to save" in ours
        assert "Traceback" not in ours
        assert "gloo" not in launch.output


@pytest.mark.long  # test_kills.py kills main ranks, too, and looks for what is left behind
def test_a_killed_main_rank_leaves_no_environment_server(workshop):
    run_dir, slow = workshop.run_dir("killed_main"), _environments(workshop, "killed_main", seconds=0.05)
    with launched(workshop.rl("killed_main", train_iters=STEPS, langrl_env_config=slow), run_dir) as launch:
        launch.wait_for_step(1)
        assert len(launch.processes()) == 2  # the rank and its environment server
        launch.signal(signal.SIGKILL)
        assert launch.wait() == -signal.SIGKILL
        assert launch.leftovers() == []


@pytest.mark.long  # tests/unit/environments/test_server_faults.py kills a server as often under a client's requests
@pytest.mark.parametrize("kills", [3, 20])
def test_a_run_whose_environment_server_is_killed_is_the_undisturbed_one(workshop, whole, kills):
    """At random moments, on two ranks: no rollout is lost or graded twice, and every reward is the same."""
    name = f"server_killed_{kills}"
    run_dir, slow = workshop.run_dir(name), _environments(workshop, name, seconds=0.05)
    flags = {"train_iters": STEPS, "langrl_env_config": slow, "use_distributed_optimizer": True}
    source, killed = random.Random(kills), []
    with forked(workshop.rl(name, **flags), run_dir, ranks=2) as launch:
        launch.wait_for_step(1)
        address_file = next(run_dir.glob("logs/environments_*")) / "environment_server.json"
        while len(killed) < kills:
            client = EnvironmentClient(address_file)
            launch.wait_until(lambda: client.health() and launch.server().pid not in killed, "a new server")  # noqa: B023
            time.sleep(source.uniform(0.0, 0.3))
            server = launch.server()
            server.kill()
            killed.append(server.pid)
        assert launch.wait() == 0, launch.output[-3000:]
        assert f"restart {kills}," in launch.output
        assert launch.leftovers() == []
    assert rows_of(run_dir) == rows_of(whole)
    assert differences(run_dir / LAST, whole / LAST) == []
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert sum(row["environment/restarts"] for row in rows) == kills
    assert sum(row["environment/requests_repeated"] for row in rows) > 0
    assert all(row["training/failed_grades"] == 0 for row in rows)


def test_a_stop_before_the_first_update_is_saved_and_resumed(workshop):
    run_dir, started = workshop.run_dir("early"), workshop.folder / "early_started"
    slow = _environments(workshop, "early", seconds=0.2, started=str(started))
    flags = {"langrl_env_config": slow, "eval_interval": 2, "rl_prompts_per_eval": 2, "rl_samples_per_eval_prompt": 2}
    with forked(workshop.rl("early", **flags), run_dir) as launch:
        launch.wait_until(started.exists, "the first grade")
        launch.signal_rank(0, signal.SIGTERM)
        assert launch.wait() == 0
        assert launch.leftovers() == []
    checkpoint = run_dir / "checkpoints" / "step_0000000"
    assert state_of(checkpoint)["has_optimizer"] is False
    assert facts_of(run_dir)["status"] == "stopped"

    quick = _environments(workshop, "early", seconds=0.0)
    undisturbed = flags | {"langrl_env_config": quick}
    resumed, other = run_many([workshop.rl("early", **undisturbed, resume=True), workshop.rl("early2", **undisturbed)])
    assert "(step 0)" in resumed.check().output
    assert f"changed since the checkpoint: --langrl-env-config {quick} (was other content)\n" in resumed.output
    other.check()
    assert rows_of(run_dir) == rows_of(workshop.run_dir("early2"))


def test_a_second_run_in_a_used_directory_is_refused(workshop):
    first, second, resumed = run_many([
        workshop.supervised("used"),
        workshop.supervised("used"),
        workshop.supervised("used", resume=True),
    ])  # fmt: skip
    first.check()
    second.check(2)
    assert "1 problem(s)" in second.output
    assert "already holds a run (at step 4, status finished); continue it with --resume" in second.output
    resumed.check()
    assert facts_of(workshop.run_dir("used"))["status"] == "finished"
    assert len(rows_of(workshop.run_dir("used"))) == 4
    before = (workshop.run_dir("used") / "run.json").read_text()
    with contextlib.ExitStack() as held:
        lock(tiny_config(run_dir=workshop.run_dir("used")), held)
        third = run(workshop.supervised("used", resume=True), ranks=2).check(2)
    assert f"used is in use by process {os.getpid()} on {socket.gethostname()}; wait until" in third.output
    assert "Traceback" not in third.output
    assert (workshop.run_dir("used") / "run.json").read_text() == before


def test_a_second_ctrl_c_ends_at_once(workshop):
    run_dir, started = workshop.run_dir("twice"), workshop.folder / "twice_started"
    slow = _environments(workshop, "twice", seconds=2, started=str(started))
    with forked(workshop.rl("twice", langrl_env_config=slow, exit_grace_seconds=600), run_dir) as launch:
        launch.wait_until(started.exists, "the first grade")
        launch.signal_rank(0, signal.SIGINT)
        time.sleep(1.5)  # within a second it would be an echo of the first one
        launch.signal_rank(0, signal.SIGINT)
        assert launch.wait() == 130
        assert launch.leftovers() == []
        assert "Traceback" not in launch.output
        assert "interrupted a second time" in launch.output
    assert facts_of(run_dir)["status"] == "failed"
