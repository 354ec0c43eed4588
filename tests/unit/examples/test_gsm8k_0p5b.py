"""GSM8K with a 0.5B: the script's forms and its mistakes, the study's commands and its table."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.config.arguments import read_config
from megatron_rl.environments.config import load_environment_specs
from tests.support.recipes import EXAMPLES, launched
from tests.unit.families.test_published_models import PUBLISHED

SCRIPT = EXAMPLES / "gsm8k_0p5b" / "run.sh"
ROOT = EXAMPLES.parent
MODEL = os.environ.get("MODEL_0P5B", "")
"""A directory or GGUF file of a Qwen2.5 0.5B, for the test that trains it; without a hub ``DATA``, too."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Eight problems to train on and eight others to test."""
    folder = tmp_path / "data"
    folder.mkdir()
    for split, first in (("train", 0), ("test", 8)):
        numbers = range(first, first + 8)
        rows = [{"question": f"What is {i} plus 1?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1}"} for i in numbers]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Qwen2.5-0.5B's configuration."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen2.5-0.5B"][0]))
    return tmp_path


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch):
    """The example's module."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.chdir(ROOT)
    yield importlib.import_module("study")
    sys.modules.pop("study")


@pytest.mark.parametrize("form", ["last", "strict"])
def test_quick_is_two_steps_on_local_data(data: Path, model: Path, tmp_path: Path, form: str, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    launch = launched(SCRIPT, "--quick", MODEL=str(model), DATA=str(data), FORM=form, RUN_DIR=str(tmp_path / "run"))
    config, problems = read_config([*launch.flags, "--tokenizer-model", "unused"], launch.ranks)
    assert problems == []
    assert (config.total_steps, config.precision.bf16) == (2, False)
    (spec,) = load_environment_specs(config.environment.langrl_env_config)
    environment = spec.create()
    assert [len(list(environment.tasks(split))) for split in ("train", "test")] == [8, 8]
    assert spec.options["strict"] == (form == "strict")


@pytest.mark.parametrize(
    ("variables", "words"),
    [({"FORM": "loose"}, ["FORM", "loose"]), ({"DATA": "/nowhere"}, ["DATA", "test.jsonl", "/nowhere"])],
    ids=["form", "data"],
)
def test_a_mistake_is_one_line(variables: dict[str, str], words: list[str], tmp_path: Path) -> None:
    given = os.environ | variables | {"RUN_DIR": str(tmp_path / "run")}
    outcome = subprocess.run(["bash", str(SCRIPT), "--quick"], env=given, capture_output=True, text=True)
    assert outcome.returncode == 2
    (line,) = outcome.stderr.splitlines()
    assert all(word in line for word in words)
    assert not (tmp_path / "run").exists()


def _commands(study, monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, list[str]]:
    """All that a study would start, by name."""
    options, further = study.parse([*words])
    found: dict[str, list[str]] = {}
    plan = study.Study(options, study.QUICK if options.quick else study.Size(), further)
    monkeypatch.setattr(plan, "launch", lambda name, flags: found.update({name: plan.flags(name, flags)}) or True)
    plan.before()
    for arm in study.ARMS:
        plan.run(arm)
    return found


@pytest.mark.parametrize("quick", [True, False])
def test_every_command_of_the_study_is_valid(study, data: Path, model: Path, tmp_path: Path, monkeypatch, quick):
    words = ["--model", str(model), "--data", str(data), "--run-dir", str(tmp_path / "runs"), "--at-once", "3"]
    commands = _commands(study, monkeypatch, *words, *(["--quick"] if quick else []), "--lr", "2e-6")
    assert len(commands) == 1 + 2 * len(study.ARMS)
    for arm in study.ARMS:
        config, problems = read_config([*commands[arm.name], "--tokenizer-model", "unused"], 1)
        assert problems == []
        assert (config.optimizer.lr, config.rollout.rl_rollout_memory_fraction) == (2e-6, 0.3)
        assert config.quantization.rl_rollout_quantization == arm.rollouts
        assert config.algorithm.rl_correction == arm.correction
        assert config.samples_per_step == config.training.global_batch_size == (8 if quick else 160)
        assert config.precision.bf16 != quick
    for name in ("before", f"{arm.name}.whole"):
        config, problems = read_config([*commands[name], "--tokenizer-model", "unused"], 1)
        assert problems == []
        (spec,) = load_environment_specs(config.environment.langrl_env_config)
        assert spec.eval_prompts == (4 if quick else 1319)


def test_the_order_is_that_of_value(study) -> None:
    pairs = ["bf16-none", "int8-none", "int8-token_tis", "fp8-token_tis", "fp8-none"]
    assert [arm.name for arm in study.ARMS] == [f"{pair}-seed{seed}" for seed in (1, 2) for pair in pairs]


def test_the_table_of_what_there_is(study, tmp_path: Path) -> None:
    def note(name: str, *rows: dict[str, float]) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    assert study.table(tmp_path) == "whole test split before training: -"
    note("before", {"step": 0, study.SCORE: 0.436})
    steps = [{"step": step, study.GAP: step / 1000, "timing_s/step": float(step)} for step in (1, 2, 3)]
    note("int8-none-seed1", {"step": 0, study.SCORE: 0.25}, *steps[:2], {**steps[2], study.SCORE: 0.5})
    note("int8-none-seed1.whole", {"step": 3, study.SCORE: 0.502})
    (tmp_path / "int8-none-seed1" / "summary.json").write_text('{"status": "finished"}')
    lines = study.table(tmp_path).replace("|", " ").splitlines()
    assert lines[0].endswith("0.436")
    rows = [line.split() for line in lines if line.strip().startswith("int8-none-seed1")]
    assert rows[0][1:] == ["finished", "3", "0.250", "0.500", "0.502", "2", "-", "-"]
    assert rows[1][1:] == ["2.00e-03"], "the mean of the steps between two evaluations"


def _tiny(folder: Path) -> Path:
    runpy.run_path(str(EXAMPLES / "rehearsal" / "prepare.py"))["write_model"]("qwen2", folder)
    return folder


@pytest.mark.long
def test_one_arm_of_the_study_runs(data: Path, tmp_path: Path) -> None:
    words = ["--quick", "--model", _tiny(tmp_path / "model"), "--data", data, "--run-dir", tmp_path / "runs"]
    command = [sys.executable, SCRIPT.with_name("study.py"), *words, "--arms", "int8-token_tis-seed1", "--at-once", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    first = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
    assert first.returncode == 0, first.stdout + first.stderr
    lines = first.stdout.replace("|", " ").splitlines()
    (row, _) = [line.split() for line in lines if line.strip().startswith("int8-token_tis")]
    assert row[1:3] == ["finished", "2"]
    assert "-" not in row[3:8]
    again = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
    assert again.returncode == 0
    assert " ..." not in again.stdout, "what has finished is not repeated"


@pytest.mark.long
@pytest.mark.skipif(not MODEL, reason="give MODEL_0P5B, a Qwen2.5 0.5B, and without a hub DATA, a directory of GSM8K")
def test_quick_trains_the_real_model(tmp_path: Path) -> None:
    given = os.environ | {"MODEL": MODEL, "RUN_DIR": str(tmp_path / "run")}
    outcome = subprocess.run(["bash", str(SCRIPT), "--quick"], env=given, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stdout[-4000:] + outcome.stderr[-4000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "finished"
