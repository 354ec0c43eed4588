"""A first run in one line trains, and the command that it prints is the same run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.support.forks import run_python
from tests.support.hugging_face import write_model
from tests.support.runs import rows_of
from tests.support.tiny import write_tokenizer

SHAPE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 128,
}  # fmt: skip
REWARDS = "def short(completions, **columns):\n    return [1.0 if len(text) < 6 else 0.0 for text in completions]\n"


def test_the_printed_command_is_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path / "model")
    write_model(tmp_path / "model", "llama", SHAPE)
    rows = [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(REWARDS)
    words = ["--model", "model", "--data", "sums.jsonl", "--reward", "exact", "mine.py:short=0.5"]
    words += ["--train-iters", "2", "--rl-max-new-tokens", "12"]
    finished = run_python("-m", "megatron_rl.cli", "train", *words, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr[-3000:]
    [first] = (tmp_path / "runs").iterdir()
    assert [row["step"] for row in rows_of(first)] == [1, 2]
    command = finished.stdout.split("\n\n")[1].replace("\\\n", "")
    program, name, *flags = shlex.split(command)
    assert (program, name, flags[:2]) == ("megatron-rl", "train", ["--nproc", "1"])
    assert shlex.split((first / "command.txt").read_text()) == [program, name, *flags]
    again = run_python("-m", "megatron_rl.cli", name, *flags, "--run-dir", "runs/again", cwd=tmp_path)
    assert again.returncode == 0, again.stderr[-3000:]
    assert rows_of(tmp_path / "runs" / "again") == rows_of(first)
