"""`--ckpt-format torch`: stopped and resumed in the same topology, bit for bit; another one is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import contents, differences
from tests.support.runs import facts_of, rows_of, run_many

TORCH = {"ckpt_format": "torch"}
CASES: dict[str, dict[str, Any]] = {
    "tensor_parallel": {**TORCH, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    "replicas_bf16": {**TORCH, "use_distributed_optimizer": True, "bf16": True},
}


@pytest.fixture(scope="module")
def runs(workshop) -> None:
    """Whole runs and first halves in one process a rank, the second halves in fresh ones."""
    first = [workshop.rl(f"{name}_whole", **flags) for name, flags in CASES.items()]
    first += [workshop.rl(f"{name}_halved", **flags, exit_interval=2) for name, flags in CASES.items()]
    for outcome in run_many(first, ranks=2):
        outcome.check()
    second = [workshop.rl(f"{name}_halved", **flags, exit_interval=2, resume=True) for name, flags in CASES.items()]
    for outcome in run_many(second, ranks=2):
        assert "(step 2)" in outcome.check().output


def test_a_resumed_run_ends_as_if_it_had_not_stopped(runs, workshop) -> None:
    last = Path("checkpoints") / "iter_0000004"
    for name in CASES:
        whole, halved = workshop.run_dir(f"{name}_whole"), workshop.run_dir(f"{name}_halved")
        assert facts_of(halved)["status"] == "finished"
        assert differences(whole / last, halved / last) == [], name
        assert rows_of(whole) == rows_of(halved), name
        names = contents(whole / last)
        for part in ("exp_avg", "step", ".model.", "random/cpu"):
            assert any(part in key for key in names), f"{name}: {part} was not compared"
        pointer = halved / "checkpoints" / "latest_checkpointed_iteration.txt"
        assert pointer.read_text().strip() == "4"
    ranks = workshop.run_dir("tensor_parallel_whole") / last
    assert sorted(str(path.relative_to(ranks)) for path in ranks.glob("mp_rank_*/*")) == [
        "mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt",
    ]  # fmt: skip


def test_another_topology_is_refused_in_one_line(runs, workshop) -> None:
    source = {name: workshop.run_dir(f"{name}_halved") / "checkpoints" / "iter_0000002" for name in CASES}
    commands = [
        workshop.rl("other_1", load=source["tensor_parallel"]),
        workshop.rl("other_2", pretrained_checkpoint=source["tensor_parallel"]),
        workshop.rl("other_3", load=source["replicas_bf16"], use_distributed_optimizer=True, bf16=True),
    ]
    expected = ["--tensor-model-parallel-size 2, this run has 1"] * 2 + ["saved by 2 ranks, this run has 1"]
    for outcome, text in zip(run_many(commands), expected, strict=True):
        assert outcome.codes != (0,)
        assert sum(text in line for line in outcome.output.splitlines()) == 1, outcome.output
        assert "Traceback" not in outcome.output
