"""The task of examples/agent_tools by three ways: as an environment that answers, by an OpenAI client, by a bridge.

The same tokens for the same seeds, turn by turn and through each of them. Without ``--long``, test_harnesses.py has an
OpenAI client beside turns.
"""

from __future__ import annotations

import importlib.util
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import REPOSITORY
from tests.support.runs import rows_of, run_many

pytest.importorskip("openai", reason="the extra agents is not installed")
pytestmark = pytest.mark.long

EXAMPLE = REPOSITORY / "examples" / "agent_tools"
EASY = {"goods": 1, "max_count": 3, "max_price": 3, "train_tasks": 16, "test_tasks": 1}
EASY |= {"demonstrations": 1280, "practice": 640, "guess_share": 0.5}
"""Three possible answers, and half of the late demonstrations guess: after a short warm start some are right."""
WAYS: dict[str, dict[str, Any]] = {
    "turns": {"environment": "shop", "args": EASY},
    "client": {"environment": "megatron_rl_environments.shop.harness:ShopHarness", "name": "shop", "args": EASY},
    "verifiers": {
        "environment": "verifiers",
        "name": "shop",  # seeds contain it
        "args": {"package": str(EXAMPLE / "shop_vf.py"), "args": {"shop": EASY}, "test_args": {"split": "test"}},
    },
}
NEEDED = {"verifiers": "verifiers"}
"""A package, by the way."""
SAME = ("step", "task_id", "sample", "prompt_ids", "token_ids", "environment_spans", "reward")
"""Not the finish reason: where a tool's answer finds no room, turns end with ``length``, a client's last turn as it
did."""


@pytest.fixture(scope="module")
def runs(workshop) -> dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Samples and rows of two steps of a model that has learnt to call tools, by each way."""
    tokenizer = workshop.folder / "tokenizer"
    runpy.run_path(str(EXAMPLE / "make_tokenizer.py"))["main"](tokenizer)
    ways = [way for way in WAYS if _installed(way)]
    lists = {way: workshop.environments(way, [WAYS[way]]) for way in ways}
    flags: dict[str, Any] = {"tokenizer_model": tokenizer, "seq_length": 96}
    size = {"train_iters": 80, "global_batch_size": 16, "micro_batch_size": 16}
    run_many([workshop.supervised("warm", langrl_env_config=lists["turns"], **flags, **size)])[0].check()
    flags |= {"pretrained_checkpoint": workshop.run_dir("warm") / "checkpoints", "rl_max_new_tokens": 12}
    flags |= {"train_iters": 2, "rl_log_rollouts": 64}
    for outcome in run_many([workshop.rl(way, langrl_env_config=lists[way], **flags) for way in ways], ranks=2):
        outcome.check()
    return {way: (samples_of(workshop.run_dir(way)), rows_of(workshop.run_dir(way))) for way in ways}


def _installed(way: str) -> bool:
    return way not in NEEDED or importlib.util.find_spec(NEEDED[way]) is not None


def samples_of(run_dir: Path) -> list[dict[str, Any]]:
    """Those of both steps, in order."""
    lines = [line for path in sorted((run_dir / "rollouts").glob("step_*.jsonl")) for line in path.open()]
    return sorted(map(json.loads, lines), key=lambda row: (row["step"], row["task_id"], row["sample"]))


@pytest.mark.parametrize("way", ["client", "verifiers"])
def test_a_step_is_the_same_as_turn_by_turn(runs, way: str) -> None:
    """In the second step the weights are those that the first has made."""
    if not _installed(way):
        pytest.skip(f"pip install 'megatron-rl[{NEEDED[way]}]'")
    (by_turns, own_rows), (by_client, other_rows) = runs["turns"], runs[way]
    assert len(by_turns) == 32
    assert sum(len(sample["environment_spans"]) for sample in by_turns) > 16, "the model calls tools"
    for ours, theirs in zip(by_turns, by_client, strict=True):
        assert {name: ours[name] for name in SAME} == {name: theirs[name] for name in SAME}
        # what shares a batch with a sample differs, and with that the order of additions
        assert ours["inference_logprobs"] == pytest.approx(theirs["inference_logprobs"], rel=0, abs=1e-5)
    assert any("actor/pg_loss" in row for row in own_rows), "a step without signal has none"
    for ours, theirs in zip(own_rows, other_rows, strict=True):
        assert max(row.get("training/rollout_logprob_gap_max", 0.0) for row in (ours, theirs)) < 1e-5
        for name in ("actor/pg_loss", "critic/rewards/mean", "rollout/turns_mean"):
            assert theirs.get(name) == (pytest.approx(ours[name], rel=0, abs=1e-5) if name in ours else None), name
