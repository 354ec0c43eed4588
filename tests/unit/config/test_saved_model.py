"""What `--pretrained-checkpoint` and `--load` of ours say of the model, as `--load-hf` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.arguments import read_config
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.config.rules import notes

ARCHITECTURE = {
    "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2,
    "kv_channels": 12, "swiglu": True, "add_bias_linear": False, "qk_layernorm": True,
}  # fmt: skip
OTHERS = {"norm_epsilon": 1e-6, "tokenizer_model": "Qwen/Qwen3-0.6B", "vocab_size": 61, "max_position_embeddings": 512}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two checkpoints, of which the older one says something else, and what is none."""
    for name, layers in (("step_0000002", 9), ("step_0000010", 2), ("step_0000011.tmp", 7)):
        directory = tmp_path / "run" / "checkpoints" / name
        directory.mkdir(parents=True)
        values = {"architecture": ARCHITECTURE | {"num_layers": layers}, "flags": OTHERS, "seed": 7}
        (directory / "run_state.json").write_text(json.dumps(values))
    return tmp_path / "run"


def _read(*flags: Any) -> tuple[RLConfig, list[str]]:
    given = "--langrl-env-config e.yaml --run-dir r --lr 1e-6 --train-iters 1 --seq-length 64"
    config, problems = read_config([*given.split(), *map(str, flags)], 1)
    return config, [str(problem) for problem in problems]


@pytest.mark.parametrize("below", ["", "checkpoints", "checkpoints/step_0000010", "checkpoints/*10"])
@pytest.mark.parametrize("flag", ["--pretrained-checkpoint", "--load"])
def test_a_checkpoint_of_ours_says_what_its_model_is(run_dir: Path, flag: str, below: str) -> None:
    config, problems = _read(flag, run_dir / below, *(["--eval-only"] if "*" in below else []))
    assert problems == []
    assert {name: getattr(config.model, name) for name in ARCHITECTURE} == ARCHITECTURE
    assert config.model.norm_epsilon == 1e-6 and config.model.group_query_attention
    assert config.tokenizer.tokenizer_model == "Qwen/Qwen3-0.6B" and config.tokenizer.vocab_size == 61


@pytest.mark.parametrize("flag", ["--pretrained-checkpoint", "--load"])
def test_an_evaluation_takes_the_seed_of_the_run_and_says_so(run_dir: Path, flag: str) -> None:
    """Else the same weights have another result than in the run. A run that goes on from weights has its own seed."""
    config, problems = _read(flag, run_dir, "--eval-only")
    assert problems == [] and config.training.seed == 7
    assert [note for note in notes(config) if note.startswith("--seed 7 is that of the run")]
    assert _read("--eval-only", "--load", run_dir / "checkpoints" / "*")[0].training.seed == 7
    own = _read(flag, run_dir, "--eval-only", "--seed", "5")[0]
    assert own.training.seed == 5 and not [note for note in notes(own) if "--seed" in note]
    assert _read(flag, run_dir)[0].training.seed == 1234


def test_what_is_typed_stays_and_what_contradicts_is_one_line(run_dir: Path) -> None:
    config, problems = _read("--pretrained-checkpoint", run_dir, "--tokenizer-model", "other", "--norm-epsilon", "1e-6")
    assert problems == [] and config.tokenizer.tokenizer_model == "other"
    _, (line,) = _read("--pretrained-checkpoint", run_dir, "--norm-epsilon", "1e-5")
    assert "--norm-epsilon 1e-05 contradicts" in line
    assert "step_0000010/run_state.json, which means --norm-epsilon 1e-06" in line


def test_a_hugging_face_directory_comes_first(run_dir: Path) -> None:
    """Its absence is the one problem."""
    _, (line,) = _read("--load", run_dir, "--load-hf", run_dir / "nowhere")
    assert "nowhere/config.json cannot be read" in line


def test_a_tokenizer_that_is_gone_is_one_line(run_dir: Path) -> None:
    file = run_dir / "checkpoints" / "step_0000010" / "run_state.json"
    gone = OTHERS | {"tokenizer_model": str(run_dir / "gone")}
    file.write_text(json.dumps({"architecture": ARCHITECTURE, "flags": gone, "seed": 7}))
    _, (line,) = _read("--pretrained-checkpoint", run_dir)
    assert line.startswith(f"{file} was saved with the tokenizer {run_dir / 'gone'}, which is gone; name one with")
    assert _read("--pretrained-checkpoint", run_dir, "--tokenizer-model", "other")[1] == []


@pytest.mark.parametrize("text", ['{"architecture": {"num_layers": 2}}', "not json", '{"flags": {"a": 1}}', "[]"])
def test_one_that_does_not_say_wants_the_flags_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "step_0000002").mkdir()
    (tmp_path / "step_0000002" / "run_state.json").write_text(text)
    _, (line,) = _read("--pretrained-checkpoint", tmp_path, "--num-layers", "2")
    assert f"--pretrained-checkpoint {tmp_path} does not say what its model is" in line
    assert "--hf-config DIR" in line and "--hidden-size, --num-attention-heads, --tokenizer-model and" in line
    shape = ("--num-layers", 2, "--hidden-size", 8, "--num-attention-heads", 2, "--tokenizer-model", "t")
    assert _read("--pretrained-checkpoint", tmp_path, *shape)[1] == []
