"""The example of code with unit tests: its data, its prompts, its command; and, with --long and MODEL, a run of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.config.arguments import read_config
from megatron_rl.environments.config import load_environment_specs
from megatron_rl.environments.grading.unit_tests import code_of

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "code_0p5b"
MODEL = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu",
    "tie_word_embeddings": True,
}  # fmt: skip
"""The configuration of Qwen2.5-Coder-0.5B-Instruct."""
FIRST_LINE = "def add(a, b):\n"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A directory with a few rows of both data sets, in the columns that are published."""
    folder = tmp_path / "data"
    folder.mkdir()
    mbpp = [
        {
            "text": f"Write a function to add {number}.", "code": "", "task_id": number, "test_setup_code": "",
            "test_list": [f"assert add(1, {number}) == {number + 1}"], "challenge_test_list": [],
        }
        for number in (10, 511, 600, 601, 974)
    ]  # fmt: skip
    humaneval = {
        "task_id": "HumanEval/0", "prompt": f'{FIRST_LINE}    """ Add. """\n', "entry_point": "add",
        "canonical_solution": "    return a + b\n", "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
    }  # fmt: skip
    (folder / "mbpp.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mbpp))
    (folder / "humaneval.jsonl").write_text(json.dumps(humaneval) + "\n")
    return folder


def _run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in words], cwd=ROOT, capture_output=True, text=True)


def test_training_rows_are_the_published_ones_and_prompts_ask_for_code(data: Path, tmp_path: Path):
    outcome = _run(sys.executable, EXAMPLE / "prepare.py", "--data", data, "--output", tmp_path / "run")
    assert outcome.returncode == 0, outcome.stderr
    mbpp, humaneval = load_environment_specs(tmp_path / "run" / "environments.yaml")
    asked = [task.prompt[-1]["content"] for task in mbpp.create().tasks("train")]
    assert [text.splitlines()[:2] for text in asked] == [
        [f"Write a function to add {n}. Your code should pass these tests:", f"assert add(1, {n}) == {n + 1}"]
        for n in (601, 974)
    ]
    assert humaneval.evaluation_only
    (task,) = humaneval.create().tasks("test")
    complete = task.prompt[-1]["content"]
    assert all("code alone, in one Python block" in text for text in (*asked, complete))
    assert code_of(complete) == f'{FIRST_LINE}    """ Add. """\n'  # the block that the model continues is whole


def test_a_directory_that_cannot_be_made_is_one_line(data: Path):
    outcome = _run(sys.executable, EXAMPLE / "prepare.py", "--data", data, "--output", data / "mbpp.jsonl" / "run")
    assert outcome.returncode == 2
    assert len(outcome.stderr.splitlines()) == 1
    assert "use another directory" in outcome.stderr


def _flags(folder: Path, data: Path, *words: str) -> list[str]:
    """Run the script in a copy of its directories, where python notes the words of `train` and does nothing."""
    copy, programs = folder / "examples" / "code_0p5b", folder / ".venv" / "bin"
    for each in (copy, programs, folder / "tools"):
        each.mkdir(parents=True)
    (copy / "run.sh").write_text((EXAMPLE / "run.sh").read_text())
    (folder / "tools" / "setup.sh").touch()
    (programs / "python").write_text('#!/bin/sh\n[ "$1" != -m ] || printf "%s\\0" "$@" > noted\n')
    (programs / "python").chmod(0o755)
    elsewhere = data.parent  # paths are those of the caller's directory
    (elsewhere / "config.json").write_text(json.dumps(MODEL))
    command = ["bash", str(copy / "run.sh"), "--data", data.name, *words]
    subprocess.run(command, cwd=elsewhere, env={**os.environ, "MODEL": "."}, check=True, capture_output=True)
    noted = (folder / "noted").read_text().split("\0")
    assert noted[:5] == ["-m", "megatron_rl.cli", "train", "--nproc", "1"]
    return noted[5:-1]


@pytest.mark.parametrize(
    ("words", "directory", "rank"),
    [
        ([], "seed_1", 16),
        (["--full", "--seed", "2"], "full_seed_2", None),
        (["--quick"], "quick_seed_1", 16),
        (["--quick", "--full", "--clip-grad", "2"], "full_quick_seed_1", None),
    ],
)
def test_the_command_is_valid_and_each_kind_has_a_directory(
    words: list[str], directory: str, rank: int | None, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    flags = _flags(tmp_path / "copy", data, *words)
    monkeypatch.chdir(ROOT)
    config, problems = read_config([*flags, "--tokenizer-model", "unused"], 1)
    assert problems == []
    assert flags[flags.index("--load-hf") + 1] == str(tmp_path)
    assert flags[flags.index("--run-dir") + 1] == f"runs/code_0p5b/{directory}"
    assert config.checkpoint.resume
    assert config.lora.lora_rank == rank
    assert config.training.eval_interval == config.total_steps, "before and after"
    assert config.optimizer.clip_grad == (2 if "--clip-grad" in words else 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data", "no/such"], "--data needs a directory with mbpp.jsonl and humaneval.jsonl, got 'no/such'"),
        (["--data", "half"], "--data needs a directory with mbpp.jsonl and humaneval.jsonl, got 'half'"),
        (["--seed", "one"], "--seed needs a number of 0 or more, got 'one'"),
        (["--run-dir", ""], "--run-dir needs a directory"),
        (["--run-dir"], "bash examples/code_0p5b/run.sh"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_installed(words: list[str], said: str, tmp_path: Path):
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "mbpp.jsonl").touch()
    outcome = subprocess.run(["bash", EXAMPLE / "run.sh", *words], cwd=tmp_path, capture_output=True, text=True)
    assert outcome.returncode == 2
    assert said in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1


@pytest.mark.long
@pytest.mark.skipif("MODEL" not in os.environ, reason="MODEL names no Qwen2.5-Coder-0.5B-Instruct")
@pytest.mark.skipif("CODE_DATA" not in os.environ, reason="CODE_DATA names no directory of the data")
def test_two_steps_of_the_published_model(tmp_path: Path):
    """Ten minutes of one core. The second call finds nothing to do."""
    for _ in range(2):
        outcome = _run("bash", EXAMPLE / "run.sh", "--quick", "--data", os.environ["CODE_DATA"], "--run-dir", tmp_path)
        assert outcome.returncode == 0, outcome.stdout[-4000:] + outcome.stderr[-4000:]
    assert "quick_seed_1" in outcome.stdout
    rows = [json.loads(line) for line in (tmp_path / "quick_seed_1" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "critic/rewards/mean" in row] == [1, 2]
