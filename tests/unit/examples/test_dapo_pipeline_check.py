"""The pipeline check: a valid command, and a tokenizer that loses no byte."""

from __future__ import annotations

import runpy
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron_rl.config.arguments import read_config
from megatron_rl.environments.checks import survey_tasks
from megatron_rl.environments.config import load_environment_specs
from megatron_rl.tokenizer import load_tokenizer

EXAMPLE = Path(__file__).parents[3] / "examples" / "dapo_pipeline_check"


def test_the_command_is_valid_on_two_ranks():
    script = (EXAMPLE / "run.sh").read_text()
    words = shlex.split(script[script.index("exec torchrun") :].replace("\\\n", " "))
    flags = [word.replace("$RUN_DIR", "RUN") for word in words[words.index("train_rl.py") + 1 :]]
    config, problems = read_config(flags, 2)
    assert problems == []
    assert config.training.perform_rl_step
    assert config.training.train_iters == 3


def test_the_shipped_samples_have_tasks_to_train_and_to_evaluate_on(tmp_path: Path):
    """The script itself, but for the installation, the tokenizer and the launch; called from another folder."""
    script = (EXAMPLE / "run.sh").read_text()
    script = script.replace("bash tools/setup.sh", ":").replace("exec torchrun", "exec true")
    script = script.replace("python examples/", "true examples/")
    samples = tmp_path / "it's here"
    samples.symlink_to(EXAMPLE.parents[1] / "environments")
    command = ["bash", "-c", script, str(EXAMPLE / "run.sh"), "--run-dir", str(tmp_path / "run")]
    files = ["--dapo", "it's here/dapo/sample.jsonl", "--aime", str(samples / "aime" / "sample.jsonl")]
    subprocess.run([*command, *files], check=True, cwd=tmp_path)
    dapo, aime = (spec.create() for spec in load_environment_specs(tmp_path / "run" / "environments.yaml"))
    assert survey_tasks(dapo).counts == {"train": 18, "test": 2}
    assert survey_tasks(aime).counts == {"test": 5}
    assert aime.evaluation_only


@pytest.mark.parametrize("text", ["Answer: 33", "$\\frac{1}{2}$ \u2212 \u5927\u4e8e\n\t", "\x00\x7f \U0001f600"])
def test_any_text_comes_back_from_its_tokens(tmp_path: Path, text: str):
    runpy.run_path(str(EXAMPLE / "make_tokenizer.py"))["main"](tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    ids = tokenizer.encode_prompt(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.encode())


def test_chat_messages_get_their_marks(tmp_path: Path):
    runpy.run_path(str(EXAMPLE / "make_tokenizer.py"))["main"](tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    ids = tokenizer.encode_prompt(({"role": "user", "content": "hi"},))
    assert len(ids) == 4, "the user's mark, two bytes, the assistant's mark"
