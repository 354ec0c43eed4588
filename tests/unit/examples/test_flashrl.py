"""FlashRL's recipes: what their scripts take in front of the flags, and what the presets come to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_rl.config.arguments import read_config
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.environments.config import load_environment_specs
from tests.support.recipes import EXAMPLES, launched
from tests.unit.families.test_published_models import PUBLISHED

VERL, SKYRL = EXAMPLES / "flash_rl_gsm8k", EXAMPLES / "flashrl_dapo_gsm8k"


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What a script's words come to."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen2.5-0.5B"][0]))
    monkeypatch.chdir(EXAMPLES.parent)

    def start(script: Path, *words: str) -> RLConfig:
        launch = launched(script, *words, MODEL=str(tmp_path))
        config, problems = read_config([*launch.flags, "--tokenizer-model", "unused"], launch.ranks)
        assert problems == []
        return config

    return start


@pytest.mark.parametrize("script", ["gsm8k_bf16", "gsm8k_int8"])
def test_the_second_word_is_the_cap(started, script: str) -> None:
    for words, run, correction, cap in (
        ((), script, "none", None),
        (("mine",), "mine", "none", None),
        (("mine", "-1", "--lr", "2e-6"), "mine", "none", None),
        (("mine", "8", "--lr", "2e-6"), "mine", "token_tis", 8.0),
    ):
        config = started(VERL / f"{script}.sh", *words)
        assert config.logging.run_dir == f"runs/flash_rl_gsm8k/{run}"
        assert config.algorithm.rl_correction == correction
        assert config.algorithm.rl_correction_args == (() if cap is None else (f"cap={cap:g}",))
        assert config.optimizer.lr == (2e-6 if "--lr" in words else 1e-6)
        assert config.quantization.rl_rollout_quantization == ("int8" if "int8" in script else "none")
        assert config.wants_critic


def test_an_evaluation_goes_over_every_checkpoint_and_lies_beside_them(started) -> None:
    config = started(VERL / "eval.sh", "runs/mine/checkpoints/*", "--seed", "2")
    assert config.training.eval_only
    assert config.checkpoint.load == "runs/mine/checkpoints/*", "the shell has not put names in its place"
    assert config.logging.run_dir == "runs/mine/evaluation"
    assert config.quantization.rl_rollout_quantization == "none"


@pytest.mark.parametrize(
    ("script", "recipe", "cap", "updates"),
    [
        ("gsm8k_0p5b_int8", "int8", 2.0, 4), ("gsm8k_0p5b_fp8", "fp8", 2.0, 4), ("dapo_0p5b_int8", "int8", 2.0, 4),
    ],
)  # fmt: skip
def test_presets_and_runs_are_put_together(started, script: str, recipe: str, cap: float, updates: int) -> None:
    config = started(SKYRL / f"{script}.sh")
    algorithm = config.algorithm
    assert config.quantization.rl_rollout_quantization == recipe
    assert (algorithm.rl_correction, algorithm.rl_correction_args) == ("token_tis", (f"cap={cap:g}",))
    assert "dual_clip=10" in algorithm.rl_policy_loss_args
    assert (algorithm.rl_truncated, algorithm.grpo_group_size) == ("mask", 5)
    assert config.samples_per_step // config.training.global_batch_size == updates
    assert config.rollout.inference_max_seq_length - config.rollout.rl_max_new_tokens == 512


@pytest.mark.parametrize("script", [*SKYRL.glob("*.sh"), VERL / "dapo_32b_bf16.sh"], ids=lambda path: path.stem)
def test_the_overlong_buffer_ends_where_answers_are_cut(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    config = read_config(launched(script, MODEL="nowhere").flags, 1)[0]
    [training] = [s for s in load_environment_specs(config.environment.langrl_env_config) if not s.evaluation_only]
    assert training.options["overlong_buffer"] > 0
    assert training.options["max_response_tokens"] == config.rollout.rl_max_new_tokens
