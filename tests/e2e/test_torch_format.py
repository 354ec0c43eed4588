"""`--ckpt-format torch`: stopped and resumed in the same topology, bit for bit; other stages or cuts are one line.

Supervised on pipeline stages. Weights leave a topology through Hugging Face's format, a run by going on in torch_dist.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import contents, differences
from tests.support.runs import copy_as_of, facts_of, rows_of, run_many

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
CONTEXT = {
    "context": {**TORCH, "context_parallel_size": 2, "use_distributed_optimizer": True},
    "replicas": {**TORCH, "use_distributed_optimizer": True},
}
"""Ranks with the same weights, of which one writes."""
MIXTURE = {**TORCH, "num_experts": 4, "moe_ffn_hidden_size": 24, "add_qkv_bias": None}
SHARED = MIXTURE | {"expert_model_parallel_size": 2}
EXPERTS: dict[str, dict[str, Any]] = {
    "shared": SHARED | {"use_distributed_optimizer": True},
    "shared_whole": SHARED | {"bf16": True},
    "shared_loop": SHARED | {"no_moe_grouped_gemm": True},
    "shared_uncut": SHARED | {
        "tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1,
        "use_distributed_optimizer": True,
    },
}  # fmt: skip
ON_FOUR: dict[str, dict[str, Any]] = {
    "replicas": SHARED | {"use_distributed_optimizer": True, "bf16": True},
    "stages": SHARED | {"num_layers": 4, "pipeline_model_parallel_size": 2, "use_distributed_optimizer": True},
    "virtual": SHARED | {
        "num_layers": 4, "pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1,
    },
    "uncut": SHARED | {
        "tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1, "use_distributed_optimizer": True,
    },
    "cut": SHARED | {"tensor_model_parallel_size": 2, "sequence_parallel": True, "use_distributed_optimizer": True},
}  # fmt: skip
"""With experts over ranks. Of four ranks with two tensor-parallel and four expert-parallel ones each has a name."""


@pytest.fixture(scope="module")
def runs(workshop) -> None:
    """Whole runs in one process a rank, and in fresh ones their second halves again, from what was saved on the way."""
    both = [(workshop.rl, CASES), (workshop.supervised, STAGES | CONTEXT | EXPERTS)]
    half = {"save_interval": 2}
    first = [command(f"{name}_whole", **flags, **half) for command, cases in both for name, flags in cases.items()]
    for outcome in run_many(first, ranks=2):
        outcome.check()
    copies = [f"{name}_halved" for _, cases in both for name in cases]
    for name in (*copies, "shared_another", "shared_alone", "shared_ungrouped", "replicas_alone"):
        copy_as_of(2, workshop.run_dir(f"{name.rpartition('_')[0]}_whole"), workshop.run_dir(name))
    half["resume"] = True
    second = [command(f"{name}_halved", **flags, **half) for command, cases in both for name, flags in cases.items()]
    for outcome in run_many(second, ranks=2):
        assert "(step 2)" in outcome.check().output


def test_a_resumed_run_ends_as_if_it_had_not_stopped(runs, workshop) -> None:
    last = Path("checkpoints") / "iter_0000004"
    for name in (*CASES, *STAGES, *CONTEXT, *EXPERTS):
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
        f"mp_rank_00_00{stage}/model_optim_rng.pt" for stage in range(2)
    ]
    experts = workshop.run_dir("shared_uncut_whole") / last
    assert sorted(path.name for path in experts.glob("mp_rank_*")) == ["mp_rank_00_000", "mp_rank_01_001"]


def test_experts_over_ranks_leave_a_topology_through_torch_dist(runs, workshop) -> None:
    """Two ranks go on for a step, which they save in torch_dist, and one rank ends the run as it would have alone."""
    one = MIXTURE | {"use_distributed_optimizer": True}
    (whole,) = run_many([workshop.supervised("one_whole", **one)])
    whole.check()
    moved = {"ckpt_format": "torch_dist", "resume": True}
    third_step = EXPERTS["shared"] | moved | {"exit_interval": 3}
    (third,) = run_many([workshop.supervised("shared_another", **third_step)], ranks=2)
    third.check()
    refused, last = run_many(
        [
            workshop.supervised("shared_alone", **one, resume=True),
            workshop.supervised("shared_another", **one | moved),
        ]
    )
    last.check()
    assert 0 not in refused.codes
    assert "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1, this run has" in refused.output
    assert "Traceback" not in refused.output
    _assert_alike(workshop, "shared_another", "one_whole")


def _assert_alike(workshop, run: str, wanted: str) -> None:
    for own, other in zip(rows_of(workshop.run_dir(run)), rows_of(workshop.run_dir(wanted)), strict=True):
        for name in ("train/loss", "actor/grad_norm"):
            assert own[name] == pytest.approx(other[name], rel=1e-4), (run, name, own["step"])


def test_a_run_goes_on_with_other_replicas_or_experts_in_a_loop(runs, workshop) -> None:
    """And from there in torch_dist, where any layout could go on."""
    alone = {"use_distributed_optimizer": True, "resume": True}
    for format_, stop in (("torch", {"exit_interval": 3}), ("torch_dist", {})):
        (outcome,) = run_many([workshop.supervised("replicas_alone", ckpt_format=format_, **alone, **stop)])
        outcome.check()
        ungrouped = EXPERTS["shared"] | {"ckpt_format": format_, "resume": True, "no_moe_grouped_gemm": True} | stop
        (outcome,) = run_many([workshop.supervised("shared_ungrouped", **ungrouped)], ranks=2)
        outcome.check()
    _assert_alike(workshop, "replicas_alone", "replicas_whole")
    _assert_alike(workshop, "shared_ungrouped", "shared_whole")


@pytest.mark.long
def test_on_four_ranks_too(workshop) -> None:
    last = Path("checkpoints") / "iter_0000004"
    for part in ("whole", "halved"):
        stop = {} if part == "whole" else {"exit_interval": 2}
        for outcome in run_many(
            [workshop.supervised(f"four_{name}_{part}", **flags, **stop) for name, flags in ON_FOUR.items()], ranks=4
        ):
            outcome.check()
    again = [workshop.supervised(f"four_{name}_halved", **flags, resume=True) for name, flags in ON_FOUR.items()]
    for outcome in run_many(again, ranks=4):
        assert "(step 2)" in outcome.check().output
    for name in ON_FOUR:
        whole, halved = (workshop.run_dir(f"four_{name}_{part}") for part in ("whole", "halved"))
        assert differences(whole / last, halved / last) == [], name
        assert rows_of(whole) == rows_of(halved), name


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


def test_another_topology_takes_weights_and_no_optimizer(runs, workshop) -> None:
    source = {name: workshop.run_dir(f"{name}_halved") / "checkpoints" / "iter_0000002" for name in CASES}
    commands = [
        workshop.rl("other_1", load=source["tensor_parallel"]),
        workshop.rl("other_2", pretrained_checkpoint=source["tensor_parallel"]),
    ]
    refused, taken = run_many(commands)
    assert f"weights from {source['tensor_parallel']}" in taken.check().output
    text = "--tensor-model-parallel-size 2, this run has --tensor-model-parallel-size 1"
    assert refused.codes != (0,)
    assert sum(text in line for line in refused.output.splitlines()) == 1, refused.output
    assert "Traceback" not in refused.output
