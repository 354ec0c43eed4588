"""What a run starts from: damaged checkpoints, weights alone, other settings than those it was saved with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import contents, differences, state_of, weights
from tests.support.runs import Outcome, facts_of, rows_of, run_many

LAST = Path("checkpoints") / "step_0000004"


def _flip_a_byte(checkpoint: Path) -> Path:
    path = checkpoint / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return path


def _truncate(checkpoint: Path) -> Path:
    path = checkpoint / "metadata.json"
    path.write_bytes(path.read_bytes()[:-1])
    return path


def _remove_a_file(checkpoint: Path) -> Path:
    path = checkpoint / "state_rank_00000.safetensors"
    path.unlink()
    return path


def _empty_the_manifest(checkpoint: Path) -> Path:
    path = checkpoint / "manifest.json"
    path.write_text("")
    return path


DAMAGES: dict[str, Callable[[Path], Path]] = {
    "flipped": _flip_a_byte, "truncated": _truncate, "missing": _remove_a_file, "no_manifest": _empty_the_manifest,
}  # fmt: skip


@pytest.fixture(scope="module")
def base(workshop) -> Path:
    """A run that saved after every step, and one without optimizer states."""
    for outcome in run_many([
        workshop.rl("base", save_interval=1),
        workshop.rl("light", exit_interval=2, no_save_optim=True),
    ]):  # fmt: skip
        outcome.check()
    return workshop.run_dir("base")


@pytest.fixture(scope="module")
def outcomes(workshop, base) -> dict[str, Outcome]:
    """Every continuation of it, in one process."""
    damaged = {}
    for name, damage in DAMAGES.items():
        shutil.copytree(base, workshop.run_dir(name))
        damaged[name] = damage(workshop.run_dir(name) / LAST)
    for name in ("all_damaged", "fresh_optimizer", "other_rate"):
        shutil.copytree(base, workshop.run_dir(name))
    for checkpoint in (workshop.run_dir("all_damaged") / "checkpoints").glob("step_*"):
        _flip_a_byte(checkpoint)
    for name in ("fresh_optimizer", "other_rate"):
        for step in (3, 4):
            shutil.rmtree(workshop.run_dir(name) / "checkpoints" / f"step_{step:07d}")
    commands = {
        **{name: workshop.rl(name, resume=True, keep_last=2) for name in DAMAGES},
        "all_damaged": workshop.rl("all_damaged", resume=True),
        "fresh_optimizer": workshop.rl("fresh_optimizer", resume=True, no_load_optim=True),
        "other_rate": workshop.rl("other_rate", resume=True, lr=1e-4, min_lr=1e-4, adam_beta2=0.5),
        "light": workshop.rl("light", resume=True),
        "loaded": workshop.rl("loaded", load=base / "checkpoints" / "step_0000002"),
        "finetuned": workshop.rl("finetuned", load=base / "checkpoints" / "step_0000002", finetune=True),
        "pretrained": workshop.rl("pretrained", pretrained_checkpoint=base / "checkpoints" / "step_0000002"),
        "megatrons_way": workshop.rl(
            "megatrons_way", pretrained_checkpoint=base / "checkpoints" / "step_0000002", finetune=True,
            load=workshop.run_dir("megatrons_way") / "checkpoints",
        ),
        "still": workshop.rl("still", load=base, finetune=True, train_iters=1, lr=1e-30, min_lr=0, weight_decay=0),
    }
    return dict(zip(commands, run_many(list(commands.values())), strict=True))


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(outcomes, workshop, base, name):
    output = outcomes[name].check().output
    run_dir = workshop.run_dir(name)
    warning = next(line for line in output.splitlines() if "trying the one before it" in line)
    assert str(run_dir / LAST) in warning
    assert "(step 3)" in output
    assert rows_of(run_dir) == rows_of(base)
    assert differences(run_dir / LAST, base / LAST) == []
    kept = sorted(path.name for path in (run_dir / "checkpoints").glob("step_*"))
    assert kept == ["step_0000003", "step_0000004", "step_0000004.damaged"]


def test_a_run_without_an_undamaged_checkpoint_does_not_start_anew(outcomes, workshop, base):
    output = outcomes["all_damaged"].check(1).output
    assert "no undamaged checkpoint" in output
    assert "Traceback" not in output
    assert facts_of(workshop.run_dir("all_damaged"))["status"] == "failed"
    assert rows_of(workshop.run_dir("all_damaged")) == rows_of(base)


def test_load_continues_another_run_and_finetune_starts_over_from_its_weights(outcomes, workshop, base):
    for name in ("loaded", "finetuned", "pretrained", "megatrons_way"):
        outcomes[name].check()
    assert rows_of(workshop.run_dir("loaded")) == rows_of(base)[2:]
    assert differences(workshop.run_dir("loaded") / LAST, base / LAST) == []
    finetuned = rows_of(workshop.run_dir("finetuned"))
    assert [row["step"] for row in finetuned] == [1, 2, 3, 4]
    assert finetuned == rows_of(workshop.run_dir("pretrained")) == rows_of(workshop.run_dir("megatrons_way"))
    assert finetuned[0]["critic/rewards/mean"] != rows_of(base)[0]["critic/rewards/mean"]


def test_loaded_weights_are_the_saved_ones(outcomes, workshop, base):
    """At a learning rate of nearly 0 one update leaves every weight as it was loaded."""
    outcomes["still"].check()
    saved = weights(base / LAST)
    for name, tensor in weights(workshop.run_dir("still") / "checkpoints" / "step_0000001").items():
        assert torch.equal(tensor, saved[name]), name


def test_without_its_optimizer_state_a_run_keeps_its_place_in_the_schedule(outcomes, workshop, base):
    for name in ("fresh_optimizer", "light"):
        assert "starts without moments" in outcomes[name].check().output
        rows = rows_of(workshop.run_dir(name))
        assert [row["actor/lr"] for row in rows] == [row["actor/lr"] for row in rows_of(base)]
        assert rows[:3] == rows_of(base)[:3]
        assert differences(workshop.run_dir(name) / LAST, base / LAST) != []
    half_way = workshop.run_dir("light") / "checkpoints" / "step_0000002"
    assert state_of(half_way)["has_optimizer"] is False


def test_new_settings_win_over_those_saved_with_the_optimizer(outcomes, workshop):
    outcomes["other_rate"].check()
    run_dir = workshop.run_dir("other_rate")
    assert [row["actor/lr"] for row in rows_of(run_dir)[2:]] == [1e-4, 1e-4]
    saved = contents(run_dir / LAST)
    assert {value for name, value in saved.items() if name.endswith(".betas.1")} == {0.5}
    assert {value for name, value in saved.items() if name.endswith(".max_lr")} == {1e-4}
