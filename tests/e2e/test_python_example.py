"""`examples/python/train.py`, with fewer steps: SFT, then RL from its checkpoint, left at the wanted reward."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.support.ranks import REPOSITORY
from tests.support.runs import facts_of, rows_of


@pytest.mark.long
@pytest.mark.own_process
def test_it_trains_both_ways_and_ends_at_the_wanted_reward(tmp_path: Path, capfd):
    example = runpy.run_path(str(Path(REPOSITORY, "examples", "python", "train.py")))
    sft = example["SFT"] | {"train_iters": 2, "global_batch_size": 4, "micro_batch_size": 2}
    rl = example["RL"] | {"train_iters": 3, "grpo_prompts_per_step": 2, "grpo_group_size": 2, "micro_batch_size": 2}
    example["main"](tmp_path, sft, rl, enough=0.0)
    assert "step 1: a mean reward of" in capfd.readouterr().out
    assert (tmp_path / "sft" / "checkpoints" / "step_0000002").is_dir()
    assert [facts_of(tmp_path / kind)["status"] for kind in ("sft", "rl")] == ["finished", "stopped"]
    last = rows_of(tmp_path / "sft")[-1]
    assert last["mine/bits_per_token"] == pytest.approx(last["train/loss"] / 0.6931)
    assert len(rows_of(tmp_path / "rl")) == 1
