"""`--eval-only --load 'runs/*/checkpoints/*'`: which checkpoints that means, and what it cannot mean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.run.preflight.starts import checkpoint_problems, evaluated


@pytest.fixture
def asked(tmp_path: Path):
    """Two runs with checkpoints, and what else lies there."""
    for name in ("a/step_0000010", "a/step_0000002", "a/step_0000030.tmp", "b/step_0000010"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "a" / "latest").write_text("step_0000010")

    def config(pattern: str, eval_only: bool = True) -> RLConfig:
        base = RLConfig()
        return replace(
            base,
            training=replace(base.training, eval_only=eval_only),
            checkpoint=replace(base.checkpoint, load=str(tmp_path / pattern), finetune=True),
        )

    return config


def test_the_oldest_comes_first_and_what_is_no_checkpoint_is_passed_over(asked) -> None:
    each = evaluated(asked("a/*"))
    assert [Path(config.checkpoint.load).name for config in each] == ["step_0000002", "step_0000010"]


def test_without_a_pattern_it_is_the_configuration_itself(asked) -> None:
    for config in (asked("a"), asked("a/*", eval_only=False)):
        assert evaluated(config) == [config]


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("c/*", "matches no checkpoint; they are called step_"), ("*/step_0000010", "are of the same step; evaluate")],
)
def test_what_cannot_be_evaluated_is_one_line(asked, pattern: str, text: str) -> None:
    (problem,) = checkpoint_problems(asked(pattern), None)
    assert problem.flag == "--load"
    assert text in problem.text
