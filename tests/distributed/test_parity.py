"""One rank, two data-parallel ranks and two tensor-parallel ranks are the same run.

Everything is fp32 and every draw is counter-based, so completions must agree token for token; losses, gradient
norms and weights differ only by the order of additions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.programs import STEPS
from tests.support.ranks import run_ranks
from tests.support.tiny import POST_NORMS

SUPERVISED = {
    "perform_rl_step": False,
    "grpo_group_size": False,
    "grpo_prompts_per_step": False,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "weight_decay": 0.1,
}
EXPERTS = {"qk_layernorm": True, "add_qkv_bias": False}
SEVERAL_UPDATES = {"global_batch_size": 8, "grpo_iterations": 2, "grpo_kl_beta": 0.1, "train_iters": 16}
OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"untie_embeddings_and_output_weights": False},
    "qk_layernorm": {"qk_layernorm": True},
    "fewer_groups_than_ranks": {"num_query_groups": 1, "qk_layernorm": True},
    "biases_and_layernorm": {"disable_bias_linear": False, "swiglu": False, "normalization": "LayerNorm"},
    "post_norms": POST_NORMS,
    "no_qkv_bias": {"add_qkv_bias": False, "group_query_attention": False, "num_query_groups": 4},
    "recompute_full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "recompute_selective": {"recompute_granularity": "selective"},
    "fused_output_layer": {"rl_fused_output_layer": True, "grpo_entropy_term_weight": 0.01},
    "several_updates": SEVERAL_UPDATES,
    "entropy_and_correction": {
        "grpo_entropy_term_weight": 0.01,
        "rl_correction": "token_tis",
        "rl_loss_aggregation": "sequence-mean",
        "rl_temperature": 0.7,
    },
    "three_groups": {  # of two replicas one generates two; CISPO as in its paper, open below
        "grpo_prompts_per_step": 3, "global_batch_size": 6, "rl_policy_loss": "cispo",
        "rl_policy_loss_args": ("clamp_eps_lower=1",),
    },
    "one_group": {"grpo_prompts_per_step": 1, "global_batch_size": 2},  # of two replicas one generates nothing
    "experts": {**EXPERTS, "num_experts": 4, "moe_ffn_hidden_size": 24},
    "supervised": SUPERVISED,
    "supervised_experts": {**SUPERVISED, **EXPERTS, "num_experts": 6, "moe_router_topk": 3},
    "supervised_tied": SUPERVISED | {"untie_embeddings_and_output_weights": False, "qk_layernorm": True},
}
"""Changes to `tiny_config`; each is compared with itself on one rank."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "plain+distributed": {"use_distributed_optimizer": True},
    "plain+overlap_grad": {"overlap_grad_reduce": True},
    "several_updates+distributed": SEVERAL_UPDATES | {"use_distributed_optimizer": True},
    "several_updates+overlap": SEVERAL_UPDATES | OVERLAP,
    "fused_output_layer+overlap": {"rl_fused_output_layer": True, "grpo_entropy_term_weight": 0.01} | OVERLAP,
    "supervised+distributed": SUPERVISED | {"use_distributed_optimizer": True},
    "supervised+overlap": SUPERVISED | OVERLAP,
}
"""The same after ``+`` with another optimizer: compared with what stands before it on one rank."""
TOPOLOGIES: dict[str, tuple[int, int]] = {
    "one": (1, 1),
    "data": (2, 1),
    "tensor": (2, 2),
    "tensor+sequence": (2, 2),
    "tensor+data": (4, 2),
}
"""Ranks, and how many of them share a copy of the model."""
SEQUENCE_PARALLEL = {"sequence_parallel": True}
NEEDS_SLICES = ("tensor", "tensor+data")
"""Topologies whose tensor-parallel ranks do not slice the tokens: experts are refused there."""
_SHAPES = {"qk_layernorm", "no_qkv_bias", "recompute_selective", "supervised_tied"}
_IN_OVERLAP = {"several_updates+distributed", "supervised+distributed", "plain+overlap_grad"}
_ONE_COPY = {"three_groups", "one_group"}
_WITHOUT_OVERLAP = {"plain", "several_updates", "supervised"}
LONG = {
    "data": _SHAPES | _WITHOUT_OVERLAP | {
        "fewer_groups_than_ranks", "biases_and_layernorm", "recompute_full", "fused_output_layer", "supervised_experts",
        "several_updates+distributed", "plain+distributed", "supervised+distributed", "tied", "post_norms",
    },
    "tensor": _SHAPES | _IN_OVERLAP | _ONE_COPY | _WITHOUT_OVERLAP | {
        "recompute_full", "fused_output_layer", "entropy_and_correction", "fused_output_layer+overlap", "post_norms",
        "plain+distributed", "tied",
    },
    "tensor+sequence": _SHAPES | _IN_OVERLAP | _ONE_COPY | _WITHOUT_OVERLAP | {
        "recompute_full", "fused_output_layer", "entropy_and_correction", "fused_output_layer+overlap",
        "plain+distributed", "experts",
    },
    "tensor+data": {*MODELS, *OPTIMIZERS},
}  # fmt: skip
"""What only ``--long`` runs; on one rank, what nothing else is compared with.

Replicas do not know what a layer is made of; ``fewer_groups_than_ranks`` and ``experts`` have qk_layernorm, and
test_layouts.py has fused and recomputed layers, and on tensor-parallel ranks tied weights and experts in RL. Overlap
has the distributed optimizer too, and only replicas can have too few groups."""


def variants_of(topology: str, with_long: bool) -> list[str]:
    """Names of the variants that ``topology`` is tried on."""
    if topology == "one" and not with_long:
        compared = [name for other in TOPOLOGIES if other != "one" for name in variants_of(other, with_long)]
        return [name for name in MODELS if name in {other.partition("+")[0] for other in compared}]
    return [
        variant
        for variant in (*MODELS, *(OPTIMIZERS if topology != "one" else ()))
        # Experts cannot be trained where every rank has all tokens.
        if not ("experts" in variant and topology in NEEDS_SLICES)
        and (with_long or variant not in LONG.get(topology, ()))
    ]


CASES = [
    pytest.param(topology, variant, marks=[pytest.mark.long] if variant in LONG.get(topology, ()) else [])
    for topology in TOPOLOGIES
    if topology != "one"
    for variant in variants_of(topology, with_long=True)
]
WEIGHT_TOLERANCE = 1e-5


class Reports:
    """Runs a topology when a test first asks for it."""

    def __init__(self, folder: Path, with_long: bool) -> None:
        self._folder, self.with_long = folder, with_long
        self._reports: dict[str, dict[str, Any]] = {}

    def report(self, topology: str, variant: str) -> dict[str, Any]:
        """The first rank's report of ``variant``."""
        if topology not in self._reports:
            self._reports[topology] = self._run(topology)
        return self._reports[topology][variant]

    def weights(self, topology: str, variant: str, when: str) -> dict[str, torch.Tensor]:
        """Whole weights ``before`` or ``after`` training."""
        self.report(topology, variant)
        return torch.load(self._folder / topology / f"{variant}.{when}.pt", weights_only=True)

    def _run(self, topology: str) -> dict[str, Any]:
        folder = self._folder / topology
        folder.mkdir()
        variants = {name: (MODELS | OPTIMIZERS)[name] for name in variants_of(topology, self.with_long)}
        if topology == "tensor+sequence":
            variants = {name: changes | SEQUENCE_PARALLEL for name, changes in variants.items()}
        world_size, tensor_size = TOPOLOGIES[topology]
        reports = run_ranks(
            "tests.distributed.programs:train_variants",
            world_size,
            timeout=900,
            folder=str(folder),
            tensor_size=tensor_size,
            variants=variants,
        )
        for name in variants:
            assert all(r[name]["metrics"] == reports[0][name]["metrics"] for r in reports), f"{name}: ranks differ"
        return reports[0]


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    return Reports(tmp_path_factory.mktemp("parity"), with_long=request.config.getoption("--long"))


@pytest.mark.parametrize(("topology", "variant"), CASES)
def test_many_ranks_equal_one(reports: Reports, topology: str, variant: str) -> None:
    base = variant.partition("+")[0]
    actual, expected = reports.report(topology, variant), reports.report("one", base)

    for name, value in reports.weights("one", base, "before").items():
        assert torch.equal(reports.weights(topology, variant, "before")[name], value), name
    assert actual.get("sampled") == expected.get("sampled")
    assert actual.get("greedy") == expected.get("greedy")
    # Rollouts switch it off; the numbers would be the same if it stayed off.
    assert actual["sequence_parallel"] == (topology == "tensor+sequence")
    assert len(actual["metrics"]) == len(expected["metrics"]) == STEPS
    for own, other in zip(actual["metrics"], expected["metrics"], strict=True):
        assert own.keys() == other.keys()
        for name, value in other.items():
            tolerance = 1e-4 if name == "actor/grad_norm" else 1e-5
            assert own[name] == pytest.approx(value, rel=0, abs=tolerance), name
    for name, value in reports.weights("one", base, "after").items():
        difference = (reports.weights(topology, variant, "after")[name] - value).abs().max().item()
        assert difference < WEIGHT_TOLERANCE, name


def test_training_moved_the_weights_and_answers_are_answers(reports: Reports) -> None:
    """The comparison above would hold for a run that does nothing."""
    for variant in variants_of("one", reports.with_long):
        before, after = (reports.weights("one", variant, when) for when in ("before", "after"))
        moved = [(after[name] - before[name]).abs().max().item() for name in before]
        assert min(moved) > 100 * WEIGHT_TOLERANCE, variant
    sampled = reports.report("one", "plain")["sampled"]
    assert len(sampled) == 4
    assert all(len(answers) == 4 and len(set(map(tuple, answers))) > 1 for answers in sampled.values())
