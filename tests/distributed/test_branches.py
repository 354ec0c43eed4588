"""A step on samples of several sequences: two ranks, which share a sample's sequences out, against one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks

VARIANTS: dict[str, dict[str, Any]] = {
    "token-mean": {},
    "gspo": {"rl_policy_loss": "gspo", "rl_correction": "sequence_tis", "grpo_iterations": 2},
    "picked": {
        "rl_policy_loss": "clip_cov", "rl_policy_loss_args": ("share=0.2", "lower=-9", "upper=9"),
        "rl_loss_aggregation": "constant", "rl_advantage": "reinforce_plus_plus",
    },
    "critic": {
        "rl_advantage": "gae", "rl_advantage_args": ("gamma=0.9",), "rl_kl_in_reward": True, "grpo_kl_beta": 0.05,
    },
    "turns": {"rl_turn_discount": 0.5, "rl_advantage": "rloo"},
    "critic of turns": {"rl_turn_discount": 0.5, "rl_advantage": "gae", "rl_advantage_args": ("gae_lambda=0.9",)},
}
WEIGHT_TOLERANCE = 1e-5


def run(folder: Path, world_size: int) -> list[Any]:
    folder.mkdir()
    program = "tests.distributed.step_programs:branched"
    return run_ranks(program, world_size, timeout=600, folder=str(folder), variants=VARIANTS)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, list[Any]]:
    folder = tmp_path_factory.mktemp("branches")
    return folder, run(folder / "one", 1)[0], run(folder / "two", 2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_train_as_one(reports: tuple[Path, Any, list[Any]], variant: str) -> None:
    folder, one, two = reports
    alone, ranks = one[variant], [report[variant] for report in two]
    assert ranks[0]["loss tokens"] == ranks[1]["loss tokens"] == alone["loss tokens"]
    for name, value in alone["metrics"].items():
        assert [rank["metrics"][name] for rank in ranks] == pytest.approx([value] * 2, rel=1e-4, abs=1e-5), name
    first, second = (
        torch.cat([value.flatten() for value in torch.load(folder / which / f"{variant}.pt").values()])
        for which in ("one", "two")
    )
    assert (first - second).abs().max() < WEIGHT_TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_sequences_of_one_sample_are_on_both_ranks(reports: tuple[Path, Any, list[Any]], variant: str) -> None:
    """Else the test above would show nothing."""
    _, one, two = reports
    trained = [{tuple(key) for batch in report[variant]["trained"] for key in batch} for report in two]
    assert not trained[0] & trained[1]
    assert trained[0] | trained[1] == {tuple(key) for batch in one[variant]["trained"] for key in batch}
    assert {sample for sample, _ in trained[0]} & {sample for sample, _ in trained[1]}
    assert max(number for rank in trained for _, number in rank) == 2
