"""RL with a model that has recurrent states, from transformers' files: the same run where it is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.families.family import FAMILIES
from tests.e2e.test_hugging_face import SHAPE_FLAGS
from tests.support.checkpoints import differences
from tests.support.hugging_face import write_model
from tests.support.runs import rows_of, run

LAST = Path("checkpoints") / "step_0000002"


@pytest.mark.long
def test_a_resumed_run_ends_as_the_whole_one(workshop) -> None:
    model = workshop.folder / "model"
    write_model(model, "qwen3_next", {**FAMILIES.get("qwen3_next").examples[0], "vocab_size": 20})
    flags = dict.fromkeys(SHAPE_FLAGS) | {
        "load_hf": model, "tokenizer_model": workshop.tokenizer, "train_iters": 2, "save_interval": 1, "resume": True,
        "use_distributed_optimizer": True,
    }  # fmt: skip
    run(workshop.rl("whole", **flags)).check()
    run(workshop.rl("resumed", **flags, exit_interval=1)).check()
    run(workshop.rl("resumed", **flags)).check()
    assert differences(*(workshop.run_dir(name) / LAST for name in ("whole", "resumed"))) == []
    rows = rows_of(workshop.run_dir("whole"))
    assert [row["actor/grad_norm"] > 0 for row in rows] == [True, True]
    assert max(row["training/rollout_logprob_gap_max"] for row in rows) < 5e-5
