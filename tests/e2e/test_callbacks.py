"""Callbacks and `megatron_rl.steps`: what they see, what they change, and that a run they end is saved and goes on."""

from __future__ import annotations

import asyncio
import gc
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

import megatron_rl
from megatron_rl.errors import ConfigError, MegatronRLError
from megatron_rl.run.preflight import callback_classes
from tests.support.runs import RL, TINY, facts_of, records_of, rows_of, run


def _flags(workshop, name: str, **more) -> dict:
    flags = {**TINY, **RL, "tokenizer-model": workshop.tokenizer, "langrl-env-config": workshop.digits, **more}
    return {key.replace("-", "_"): value for key, value in flags.items()} | {"run_dir": workshop.run_dir(name)}


class Watching(megatron_rl.Callback):
    """Remembers what it is called with, adds a metric, and stops at ``last``."""

    def __init__(self, last: int = 99) -> None:
        self.last, self.calls = last, []

    def on_rollouts(self, run, step, samples):
        assert gc.isenabled()  # which it is not while modules are imported
        self.calls.append(("rollouts", step, len(samples)))

    def on_evaluation(self, run, step, metrics):
        assert all(name.startswith("val/") for name in metrics)
        self.calls.append(("evaluation", step, len(metrics) > 0))
        metrics["val/mine"] = 7

    def on_step(self, run, step, metrics):
        self.calls.append(("step", step, run.total_steps))
        metrics["mine/twice"] = 2 * metrics["critic/rewards/mean"]
        del metrics["response_length/mean"]
        if step == self.last:
            run.stop("enough")


class Failing(megatron_rl.Callback):
    """Breaks in step 2, after it has changed what is logged."""

    def on_step(self, run, step, metrics):
        metrics["mine/half"] = 1.0
        if step == 2:
            raise ValueError("no such column")


@pytest.mark.own_process
def test_a_loop_over_steps_is_the_run_of_the_command_and_may_be_left_and_resumed(workshop):
    run(workshop.rl("command")).check()
    found = []

    async def as_in_a_notebook() -> None:
        for number, metrics in megatron_rl.steps(_flags(workshop, "stepped"), train_iters=4):
            found.append((number, metrics["critic/rewards/mean"]))
            metrics["mine/number"] = number
            _ = 1 / (number - 2)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(as_in_a_notebook())
    directory = workshop.run_dir("stepped")
    assert facts_of(directory)["status"] == "stopped"
    assert [path.name for path in sorted(directory.glob("checkpoints/step_*"))] == ["step_0000002"]
    for step in megatron_rl.steps(_flags(workshop, "stepped", resume=True)):
        found.append((step.number, step.metrics["critic/rewards/mean"]))
        if step.number == 3:
            break
    expected = rows_of(workshop.run_dir("command"))[:3]
    assert found == [(row["step"], row["critic/rewards/mean"]) for row in expected]
    rows = rows_of(directory)
    assert [row.pop("mine/number", None) for row in rows] == [1, 2, None]
    assert rows == expected
    assert (directory / "checkpoints" / "step_0000003").is_dir()


@pytest.mark.own_process
def test_callbacks_see_and_change_what_is_logged_and_stop_the_run(workshop):
    watching = Watching(last=3)
    flags = _flags(workshop, "watched", eval_interval=2, rl_prompts_per_eval=2, rl_samples_per_eval_prompt=2)
    summary = megatron_rl.train(flags, callbacks=[watching])
    assert (summary.status, summary.steps) == ("stopped", 3)
    assert (workshop.run_dir("watched") / "checkpoints" / "step_0000003").is_dir()
    once = [("rollouts", 1, 16), ("step", 1, 4)]
    assert watching.calls == [
        ("evaluation", 0, True), *once, ("rollouts", 2, 16), ("evaluation", 2, True), ("step", 2, 4),
        ("rollouts", 3, 16), ("step", 3, 4),
    ]  # fmt: skip
    rows = rows_of(workshop.run_dir("watched"))
    assert [row.get("val/mine") for row in rows] == [7, None, 7, None]
    assert all(row["mine/twice"] == pytest.approx(2 * row["critic/rewards/mean"]) for row in rows[1:])
    assert not any("response_length/mean" in row for row in rows[1:])
    assert len(records_of(workshop.run_dir("watched") / "rollouts" / "step_000001.jsonl")) == 16, "four groups of four"


@pytest.mark.own_process
def test_a_callback_that_raises_is_named_and_loses_no_step(workshop, capfd):
    watching = Watching()
    with pytest.raises(MegatronRLError) as caught:
        megatron_rl.train(_flags(workshop, "broken"), callbacks=[Failing(), watching])
    assert "callback Failing: on_step of step 2 failed: ValueError('no such column')" in str(caught.value)
    assert "Traceback" in capfd.readouterr().err, "where the user's code broke"
    directory = workshop.run_dir("broken")
    assert facts_of(directory)["status"] == "failed"
    assert [row.get("mine/half") for row in rows_of(directory)] == [1.0, None]
    assert watching.calls[-1] == ("step", 2, 4), "the others are called"
    assert (directory / "checkpoints" / "step_0000002").is_dir()


@pytest.fixture(scope="module")
def source(workshop) -> Path:
    """A file with callbacks, as `--callbacks` names it."""
    source = workshop.folder / "own.py"
    source.write_text(textwrap.dedent("""
        import os

        import megatron_rl

        class Stop(megatron_rl.Callback):
            def on_rollouts(self, run, step, samples):
                assert os.environ["RANK"] == "0"
                (run.run_dir / f"seen_{step}").write_text(str(len(samples)))

            def on_step(self, run, step, metrics):
                if step == 2:
                    run.stop()

        class Broken(megatron_rl.Callback):
            def on_rollouts(self, run, step, samples):
                raise KeyError("reward_of")
    """))
    return source


def test_only_rank_0_calls_and_its_stop_ends_all_ranks(workshop, source):
    ended = run(workshop.rl("two", callbacks=f"{source}:Stop", rl_log_rollouts=0), ranks=2).check()
    directory = workshop.run_dir("two")
    assert [(directory / f"seen_{step}").read_text() for step in (1, 2)] == ["16", "16"]
    assert len(rows_of(directory)) == 2
    assert (directory / "checkpoints" / "step_0000002").is_dir()
    assert "asked to stop (by a callback): saving step 2" in ended.output
    assert not list(directory.glob("rollouts/step_*")), "--rl-log-rollouts 0 holds"


@pytest.mark.long
def test_what_a_callback_of_two_ranks_raises_ends_both_after_a_save(workshop, source):
    ended = run(workshop.rl("two_broken", callbacks=f"{source}:Broken"), ranks=2)
    assert 1 in ended.codes and "callback Broken: on_rollouts of step 1 failed: KeyError('reward_of')" in ended.output
    assert (workshop.run_dir("two_broken") / "checkpoints" / "step_0000001").is_dir()


def test_what_is_no_callback_is_said_before_anything_starts(workshop, monkeypatch):
    for name in ("mine", "json:dumps", "nowhere.py:Target"):
        config = SimpleNamespace(logging=SimpleNamespace(callbacks=(name,)))
        with pytest.raises(ConfigError, match=name):
            callback_classes(config)
    with pytest.raises(ConfigError) as caught:
        megatron_rl.train(_flags(workshop, "none", callbacks=["json:dumps"]))
    assert caught.value.lines == [
        "--callbacks: 'json:dumps' is no subclass of megatron_rl.Callback; write file.py:Class"
    ]
    with pytest.raises(ConfigError, match="name classes: --callbacks"):
        megatron_rl.train(_flags(workshop, "none"), nproc=2, callbacks=[Watching()])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="for one process"):
        megatron_rl.steps(_flags(workshop, "none"))
    assert not workshop.run_dir("none").exists()
