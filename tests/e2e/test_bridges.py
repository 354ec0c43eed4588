"""The same tokens for the same seeds, turn by turn and through a bridge."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import REPOSITORY
from tests.support.runs import rows_of, run_many

pytest.importorskip("verifiers", reason="pip install 'megatron-rl[verifiers]'")
EXAMPLE = REPOSITORY / "examples/agent_tools"
STEPS = 2
EASY = {"goods": 1, "max_count": 9, "max_price": 9, "practice": 100_000, "train_tasks": 64, "test_tasks": 4}
"""A short warm start is enough to call tools."""
WAYS = {
    "turns": {"environment": "shop", "args": EASY},
    "verifiers": {
        "environment": "verifiers",
        "name": "shop",  # seeds contain it
        "args": {
            "package": str(EXAMPLE / "shop_vf.py"), "args": {"shop": EASY}, "test_args": {"split": "test"},
        },
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def run_dirs(workshop) -> dict[str, Path]:
    """Of two steps of a model that has learnt to call tools, by each way."""
    tokenizer = workshop.folder / "tokenizer"
    runpy.run_path(str(EXAMPLE / "make_tokenizer.py"))["main"](tokenizer)
    lists = {way: workshop.environments(way, [entry]) for way, entry in WAYS.items()}
    flags: dict[str, Any] = {"tokenizer_model": tokenizer, "seq_length": 96}
    learn = {"train_iters": 150, "global_batch_size": 16, "micro_batch_size": 16, "langrl_env_config": lists["turns"]}
    warm = workshop.supervised("warm", **flags, **learn)
    flags |= {"pretrained_checkpoint": workshop.run_dir("warm") / "checkpoints", "train_iters": STEPS}
    flags |= {"rl_max_new_tokens": 12, "rl_log_rollouts": 64}
    runs = [workshop.rl(way, langrl_env_config=path, **flags) for way, path in lists.items()]
    for outcome in run_many([warm, *runs]):
        outcome.check()
    return {way: workshop.run_dir(way) for way in lists}


def samples_of(run_dir: Path) -> list[dict[str, Any]]:
    """Those of all steps."""
    lines = [line for path in sorted((run_dir / "rollouts").glob("step_*.jsonl")) for line in path.open()]
    return sorted(map(json.loads, lines), key=lambda row: (row["step"], row["task_id"], row["sample"]))


def test_a_package_of_verifiers_draws_what_the_same_task_draws_turn_by_turn(run_dirs):
    """In the second step the weights are those that the first has made."""
    turns, bridged = (samples_of(run_dirs[way]) for way in WAYS)
    assert len(turns) == STEPS * 16 and sum(bool(sample["environment_spans"]) for sample in turns) > 8
    for own, expected in zip(bridged, turns, strict=True):
        for name in ("step", "task_id", "sample", "prompt_ids", "token_ids", "environment_spans", "reward"):
            assert own[name] == expected[name], name
        # what shares a batch with a sample differs, and with that the order of additions
        assert own["inference_logprobs"] == pytest.approx(expected["inference_logprobs"], rel=0, abs=1e-5)
    for own, expected in zip(*(rows_of(run_dirs[way]) for way in reversed(WAYS)), strict=True):
        assert own["training/rollout_logprob_gap_max"] < 1e-5
        for name in ("actor/pg_loss", "critic/rewards/mean", "rollout/turns_mean"):
            assert own[name] == pytest.approx(expected[name], rel=0, abs=1e-5), name
