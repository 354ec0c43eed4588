"""The example of a published model: its data, its command, its table; and, with --long, a run of it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.config.arguments import read_config
from megatron_rl.environments.config import load_environment_specs

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "smollm2"
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000, "hidden_act": "silu",
    "tie_word_embeddings": True,
}  # fmt: skip
"""The configuration of SmolLM2-135M-Instruct."""


def _run(*words: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in words], cwd=ROOT, capture_output=True, text=True, **options)


def test_no_held_out_sum_is_trained_on(tmp_path: Path):
    _run(sys.executable, EXAMPLE / "prepare.py", "--task", "sums", "--output", tmp_path / "sums", check=True)
    (spec,) = load_environment_specs(tmp_path / "sums" / "environments.yaml")
    train, test = ({task.prompt[-1]["content"] for task in spec.create().tasks(split)} for split in ("train", "test"))
    assert not train & test
    assert train | test == {f"What is {first} plus {second}?" for first in range(100) for second in range(100)}
    assert 500 < len(test) < 750  # one in 16


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path):
    (tmp_path / "file").touch()
    outcome = _run(sys.executable, EXAMPLE / "prepare.py", "--task", "sums", "--output", tmp_path / "file" / "sums")
    assert outcome.returncode == 2
    assert len(outcome.stderr.splitlines()) == 1
    assert "use another directory" in outcome.stderr


def test_the_command_is_valid(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    script = (EXAMPLE / "run.sh").read_text().replace("\\\n", " ")
    words = shlex.split(script[script.index("torchrun --standalone") : script.index("done\npython")])
    flags = words[words.index("train_rl.py") + 1 :]
    values = {"$MODEL": str(tmp_path), "$PRECISION": "--bf16"}
    values |= {"$SEED": "1", "$LENGTH": "32", "$STEPS": "60", "$HELD_OUT": "128"}
    flags = [values.get(flag, flag) for flag in flags if flag != "${FLAGS[@]}"]
    config, problems = read_config(flags, 1)
    assert problems == []
    assert config.checkpoint.resume
    assert config.training.rl_share_prompts


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--task", "poems"], "--task is sums, instructions or gsm8k, got 'poems'"),
        (["--seeds", "one"], "--seeds needs numbers, for example 1,2,3, got 'one'"),
        (["--run-dir", ""], "--run-dir needs a directory"),
        (["--task"], "bash examples/smollm2/run.sh"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_installed(words: list[str], said: str):
    outcome = _run("bash", EXAMPLE / "run.sh", *words)
    assert outcome.returncode == 2
    assert said in outcome.stderr


def test_the_table_has_a_row_a_run_and_the_means(tmp_path: Path):
    for seed, after in ((1, 0.75), (2, 0.25)):
        _write_run(tmp_path / f"seed_{seed}", after)
    directories = sorted(tmp_path.glob("seed_*"))
    table = _run(sys.executable, EXAMPLE / "summarise.py", "--run-dirs", *directories, check=True).stdout
    assert "0.000 ± 0.100 -> 0.750 ± 0.100" in table
    assert next(line for line in table.splitlines() if line.startswith("mean")).count("0.000 -> 0.500") == 4
    (answers,) = (line for line in table.splitlines() if line.startswith("What is"))
    cells = [cell.strip() for cell in answers.split("|")]
    assert cells == ["What is / 1 plus 2?", "1 / is less ...", f"* {'3' * 320} [...]"]


def test_a_stopped_run_is_one_line(tmp_path: Path):
    _write_run(tmp_path / "seed_1", 0.5)
    (tmp_path / "seed_1" / "rollouts" / "eval_0000060.jsonl").unlink()
    outcome = _run(sys.executable, EXAMPLE / "summarise.py", "--run-dirs", tmp_path / "seed_1")
    assert outcome.returncode == 1
    assert len(outcome.stderr.splitlines()) == 1
    assert "repeat the command to continue" in outcome.stderr


def _write_run(run_dir: Path, after: float) -> None:
    """A run's summary and its greedy answers to one question, wrong before and right after."""
    measures = ("pass@1", "greedy", "reward", "truncated")
    ends = {
        end: {**dict.fromkeys(measures, value), "response_length": 9.0, "pass@1_ci95": 0.1}
        for end, value in (("before", 0.0), ("after", after))
    }
    (run_dir / "rollouts").mkdir(parents=True)
    summary = {"eval": ends, "seconds": {"run": 60.0}, "logprob_gap_max": 1e-6}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    prompt = "<|im_start|>user\nWhat is\n1 plus 2?<|im_end|>\n<|im_start|>assistant\n"
    for step, text, correct in ((0, "1\n is less", False), (60, "3" * 321, True)):
        row = {"task_id": "a", "prompt": prompt, "completion": text, "correct": correct, "greedy": True}
        row["finish_reason"] = "stop" if correct else "length"
        (run_dir / "rollouts" / f"eval_{step:07}.jsonl").write_text(json.dumps(row) + "\n")


@pytest.mark.long
def test_three_steps_of_the_published_model(tmp_path: Path):
    """Installs its wheel; twenty minutes of one core. The second call goes on from the first, and has nothing to do."""
    for _ in range(2):
        outcome = _run("bash", EXAMPLE / "run.sh", "--quick", "--run-dir", tmp_path)
        assert outcome.returncode == 0, outcome.stdout[-4000:] + outcome.stderr[-4000:]
    assert "seed_1" in outcome.stdout
    rows = [json.loads(line) for line in (tmp_path / "sums" / "seed_1" / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["training/rollout_logprob_gap_max"] for row in rows if "training/rollout_logprob_gap_max" in row]
    assert len(gaps) == 3
    assert max(gaps) < 1e-5
