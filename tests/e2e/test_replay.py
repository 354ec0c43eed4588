"""`megatron-rl replay`: a step of a finished run again, from a checkpoint before it, and a sample's part in it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_rl import cli
from megatron_rl.cli.replay import Choice, replayed_config
from megatron_rl.metrics.rundir import RunDirectory
from tests.support.runs import Outcome, records_of, rows_of, run_many

STEPS = 4


@pytest.fixture(scope="module")
def replayed(workshop) -> dict[str, tuple[Outcome, Any]]:
    """A run with several updates a step and a checkpoint amid its steps, one whose only group is its whole step, and a
    replay of each in the same process: what was written, and the numbers.
    """
    flags = {"rl_log_rollouts": 3, "rl_correction": "token_tis"}
    several = {"grpo_iterations": 2, "global_batch_size": 8, "grpo_kl_beta": 0.1, "save_interval": 2}
    alone = {"grpo_prompts_per_step": 1, "train_iters": 1, "rl_keep_zero_variance_groups": True, "seed": 3}
    chosen = {"several": ["--step", str(STEPS), "--group", "1", "--sample", "2"], "alone": ["--step", "1"]}
    files = {name: workshop.folder / f"{name}.json" for name in chosen}
    shown = [["tests/support/command.py", "replay", str(workshop.run_dir(name)), *words, "--json", str(files[name])]
             for name, words in chosen.items()]  # fmt: skip
    runs = [
        workshop.rl("several", train_iters=STEPS, **flags, **several), workshop.rl("alone", **flags, **alone),
    ]  # fmt: skip
    outcomes = run_many([*runs, *shown])
    for outcome in outcomes:
        outcome.check()
    return {name: (outcome, json.loads(files[name].read_text()))
            for name, outcome in zip(chosen, outcomes[2:], strict=True)}  # fmt: skip


def test_a_later_step_is_that_of_the_run(replayed, workshop):
    outcome, found = replayed["several"]
    assert "the same, log-probs within" in outcome.output
    assert "differs" not in outcome.output and "step 3 of 3 to 4" in outcome.output, "from the checkpoint of step 2"
    recorded = records_of(workshop.run_dir("several") / "rollouts" / f"step_{STEPS:06d}.jsonl")
    (sample,) = [row for row in recorded if (row["group"], row["sample"]) == (1, 2)]
    assert found["update"] == sample["update"]
    tokens = found["tokens"]
    assert [one["token"] for one in tokens] == sample["token_ids"]
    for one, inference in zip(tokens, sample["inference_logprobs"], strict=True):
        assert one["inference"] == pytest.approx(inference, abs=1e-5)
        assert one["old"] == pytest.approx(inference, abs=1e-4), "fp32: engine and trainer agree"
        assert one["advantage"] == pytest.approx(sample["advantage"], abs=1e-5)
    row = rows_of(workshop.run_dir("several"))[-1]
    for name in ("actor/grad_norm", "actor/pg_loss", "critic/rewards/mean"):
        assert found["metrics"][name] == pytest.approx(row[name], rel=1e-4, abs=1e-6), name


def test_a_group_that_is_the_step_has_its_gradient(replayed, workshop):
    """From the beginning, with the weights of the seed: the norms of the parts make that of the recorded step."""
    outcome, found = replayed["alone"]
    assert outcome.output.count("the same, log-probs within") == 4 and "differs" not in outcome.output
    assert all(one["gradient"] > 0 for one in found["tokens"] if one["slope"])
    page = workshop.run_dir("alone") / "replays" / "step_000001_group_0.html"
    assert str(page) in outcome.output and page.is_file()
    assert f"replays/{page.name}" in (workshop.run_dir("alone") / "report.html").read_text()
    norms, row = found["gradient_norms"], rows_of(workshop.run_dir("alone"))[-1]
    assert row["actor/grad_norm"] > 0
    assert norms["all"] == pytest.approx(row["actor/grad_norm"], rel=1e-4)
    assert norms["all"] == pytest.approx(math.hypot(*(norm for part, norm in norms.items() if part != "all")))
    assert {"layer 0", "layer 1", "output layer"} <= set(norms)
    # On-policy ratios are 1, and then the slope of token-mean is -weight x advantage / tokens of the step.
    assert found["denominator"] == len(found["tokens"])
    for one in found["tokens"]:
        assert one["ratio"] == pytest.approx(1.0)
        assert one["slope"] == pytest.approx(-one["correction"] * one["advantage"] / found["denominator"], abs=1e-7)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ((), "--step is missing"),
        (("--step", 9), "--step 9: the last step"),
        (("--step", 4, "--sample", 4), "--sample 4: a group has 4 samples, 0 to 3"),
        (("--step", 4, "--group", 4), "--group 4: a step has 4 groups"),
        (("--step", "x"), "--step"),
        (("--step", 4, "--json", "/nowhere/x.json"), "--json /nowhere/x.json cannot be written"),
        (("--step", 4, "--stepp", 3), "--stepp is not a flag"),
    ],
)
def test_what_cannot_be_shown_is_said_in_a_line(replayed, workshop, capsys, words, fault):
    code, text = _replay(capsys, workshop.run_dir("several"), *words)
    assert code == 2
    assert fault in text and len(text.splitlines()) == 2, text


def test_where_it_begins(replayed, workshop, tmp_path):
    """A run that was moved has its checkpoints below it; one told to load its own does not begin after the step."""
    moved = tmp_path / "moved"
    shutil.copytree(workshop.run_dir("several"), moved)

    def load(step: int) -> str | None:
        return replayed_config(RunDirectory(moved), Choice(step=step), tmp_path, []).checkpoint.load

    assert load(4) == load(3) == str(moved / "checkpoints" / "step_0000002")
    assert load(2) is None
    settings = yaml.safe_load((moved / "config.yaml").read_text())
    settings["checkpoint"]["load"] = settings["checkpoint"]["save"]
    (moved / "config.yaml").write_text(yaml.safe_dump(settings))
    assert load(2) is None and load(4) == str(moved / "checkpoints" / "step_0000002")


def _replay(capsys: pytest.CaptureFixture[str], run: Path, *words: Any) -> tuple[int, str]:
    code = cli.main(["replay", str(run), *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_a_directory_without_a_run(tmp_path, capsys):
    code, text = _replay(capsys, tmp_path, "--step", 1)
    assert code == 2 and "is no run directory" in text
