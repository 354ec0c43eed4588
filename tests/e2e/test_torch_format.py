"""`--ckpt-format torch`: stopped and resumed in the same topology, bit for bit; another one is one line.

Supervised on pipeline stages; weights leave a topology through Hugging Face's format.
"""

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
STAGED = {**TORCH, "num_layers": 4, "pipeline_model_parallel_size": 2, "use_distributed_optimizer": True}
STAGES: dict[str, dict[str, Any]] = {
    "stages_tied": {**STAGED, "untie_embeddings_and_output_weights": None},
    "virtual": {**STAGED, "num_layers_per_virtual_pipeline_stage": 1},
    "uneven": {**STAGED, "decoder_first_pipeline_num_layers": 3},
}
CONTEXT = {"context": {**TORCH, "context_parallel_size": 2, "use_distributed_optimizer": True}}
"""Ranks with the same weights, of which one writes."""


@pytest.fixture(scope="module")
def runs(workshop) -> None:
    """Whole runs and first halves in one process a rank, the second halves in fresh ones."""
    both = [(workshop.rl, CASES), (workshop.supervised, STAGES | CONTEXT)]
    first = [command(f"{name}_whole", **flags) for command, cases in both for name, flags in cases.items()]
    half = {"exit_interval": 2}
    first += [command(f"{name}_halved", **flags, **half) for command, cases in both for name, flags in cases.items()]
    for outcome in run_many(first, ranks=2):
        outcome.check()
    half["resume"] = True
    second = [command(f"{name}_halved", **flags, **half) for command, cases in both for name, flags in cases.items()]
    for outcome in run_many(second, ranks=2):
        assert "(step 2)" in outcome.check().output


def test_a_resumed_run_ends_as_if_it_had_not_stopped(runs, workshop) -> None:
    last = Path("checkpoints") / "iter_0000004"
    for name in (*CASES, *STAGES, *CONTEXT):
        whole, halved = workshop.run_dir(f"{name}_whole"), workshop.run_dir(f"{name}_halved")
        assert facts_of(halved)["status"] == "finished"
        assert differences(whole / last, halved / last) == [], name
        assert rows_of(whole) == rows_of(halved), name
        names = contents(whole / last)
        for part in ("exp_avg", "step", ".model0." if name == "virtual" else ".model.", "random/cpu"):
            assert any(part in key for key in names), f"{name}: {part} was not compared"
        pointer = halved / "checkpoints" / "latest_checkpointed_iteration.txt"
        assert pointer.read_text().strip() == "4"
    ranks = workshop.run_dir("tensor_parallel_whole") / last
    assert sorted(str(path.relative_to(ranks)) for path in ranks.glob("mp_rank_*/*")) == [
        "mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt",
    ]  # fmt: skip
    stages = workshop.run_dir("virtual_whole") / last
    assert sorted(str(path.relative_to(stages)) for path in stages.glob("mp_rank_*/*")) == [
        f"mp_rank_00_00{stage}/{name}.pt" for stage in range(2) for name in ("distrib_optim", "model_optim_rng")
    ]


def test_other_stages_are_refused_in_one_line(runs, workshop) -> None:
    source = {name: workshop.run_dir(f"{name}_halved") / "checkpoints" / "iter_0000002" for name in STAGES}
    (alone,) = run_many([workshop.supervised("other_4", **TORCH, num_layers=4, load=source["virtual"])])
    staged = run_many(
        [
            workshop.supervised("other_5", **STAGED, load=source["virtual"]),
            workshop.supervised("other_6", **STAGES["virtual"], load=source["uneven"]),
            workshop.supervised("other_7", **STAGED, load=source["uneven"]),
        ],
        ranks=2,
    )
    expected = ["--pipeline-model-parallel-size 2, this run has --tensor-model-parallel-size 1"]
    expected += ["other chunks of layers a stage than this model's 1"]
    expected += ["other chunks of layers a stage than this model's 2"]
    expected += ["does not fit this model (decoder.layers.2"]
    for outcome, text in zip([alone, *staged], expected, strict=True):
        assert 0 not in outcome.codes
        assert any(text in line for line in outcome.output.splitlines()), outcome.output
        assert "Traceback" not in outcome.output


def test_another_topology_is_refused_in_one_line(runs, workshop) -> None:
    source = {name: workshop.run_dir(f"{name}_halved") / "checkpoints" / "iter_0000002" for name in CASES}
    commands = [
        workshop.rl("other_1", load=source["tensor_parallel"]),
        workshop.rl("other_2", pretrained_checkpoint=source["tensor_parallel"]),
        workshop.rl("other_3", load=source["replicas_bf16"], use_distributed_optimizer=True, bf16=True),
    ]
    expected = ["--tensor-model-parallel-size 2, this run has --tensor-model-parallel-size 1"] * 2
    expected += ["saved by 2 ranks, this run has 1"]
    for outcome, text in zip(run_many(commands), expected, strict=True):
        assert outcome.codes != (0,)
        assert sum(text in line for line in outcome.output.splitlines()) == 1, outcome.output
        assert "Traceback" not in outcome.output
