"""The task of examples/agent_tools by two ways: as an environment that answers, and by an OpenAI client."""

from __future__ import annotations

import json
import runpy

import pytest

from tests.support.ranks import REPOSITORY
from tests.support.runs import rows_of, run_many

pytest.importorskip("openai", reason="the extra agents is not installed")

EASY = {"goods": 1, "max_count": 3, "max_price": 3, "train_tasks": 16, "test_tasks": 1}
EASY |= {"practice": 640, "guess_share": 0.5}
"""Three possible answers, and half of the late demonstrations guess: after a short warm start some are right."""
HARNESS = "megatron_rl_environments.shop.harness:ShopHarness"

SAME = ("step", "task_id", "sample", "prompt_ids", "token_ids", "environment_spans", "reward")
"""Not the finish reason: where a tool's answer finds no room, turns end with ``length``, a client's last turn as it
did."""


def samples_of(run_dir):
    """Those of both steps, in order."""
    lines = [line for step in (1, 2) for line in (run_dir / "rollouts" / f"step_{step:06}.jsonl").open()]
    return sorted(map(json.loads, lines), key=lambda row: (row["step"], row["task_id"], row["sample"]))


def test_a_step_is_the_same_by_turns_and_by_an_openai_client(workshop):
    tokenizer = workshop.folder / "tokenizer"
    runpy.run_path(str(REPOSITORY / "examples" / "agent_tools" / "make_tokenizer.py"))["main"](tokenizer)
    lists = {
        way: workshop.environments(way, [{"environment": reference, "name": "shop", "args": EASY}])
        for way, reference in (("step", "shop"), ("endpoint", HARNESS))
    }
    flags = {"tokenizer_model": str(tokenizer), "seq_length": 96}
    size = {"train_iters": 80, "global_batch_size": 16, "micro_batch_size": 8}
    learn = workshop.supervised("warm", langrl_env_config=lists["step"], **flags, **size)
    flags |= {"pretrained_checkpoint": str(workshop.run_dir("warm") / "checkpoints"), "rl_max_new_tokens": 12}
    flags |= {"train_iters": 2, "rl_log_rollouts": 64, "grpo_group_size": 4, "grpo_prompts_per_step": 4}
    runs = [workshop.rl(way, langrl_env_config=listed, **flags) for way, listed in lists.items()]
    for outcome in run_many([learn, *runs], ranks=2):
        outcome.check()
    by_turns, by_client = (samples_of(workshop.run_dir(way)) for way in lists)
    assert len(by_turns) == 32
    assert sum(len(sample["environment_spans"]) for sample in by_turns) > 16, "the model calls tools"
    for ours, theirs in zip(by_turns, by_client, strict=True):
        assert {name: ours[name] for name in SAME} == {name: theirs[name] for name in SAME}
        assert ours["inference_logprobs"] == pytest.approx(theirs["inference_logprobs"], abs=1e-5)
    updates = [[row for row in rows_of(workshop.run_dir(way)) if "actor/pg_loss" in row] for way in lists]
    assert updates[0], "a step without signal has none"
    for ours, theirs in zip(*updates, strict=True):
        assert ours["actor/pg_loss"] == pytest.approx(theirs["actor/pg_loss"], abs=1e-5)
        assert max(row["training/rollout_logprob_gap_max"] for row in (ours, theirs)) < 1e-5
