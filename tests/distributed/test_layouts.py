"""One rank and every parallel layout train alike: gradients, weights after three updates, log-probs, metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.tiny import DELTA, DELTA_EXPERTS, LATENT, LATENT_EXPERTS, MIXED, POST_NORMS, SINKS, WINDOWS

TIED = {"untie_embeddings_and_output_weights": False}
UNEVEN = {"num_layers": 5}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
MIXED = MIXED | {"num_layers": 4, "moe_layer_freq": "([0]*1+[1]*3)", "moe_shared_expert_gate": True}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 24, "add_qkv_bias": False, "qk_layernorm": True}
BALANCED = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}
TEACHER = str(Path(__file__).parents[1] / "support" / "teacher")
"""The shape of a larger model, with random weights."""
TAUGHT = {"rl_teacher_load_hf": TEACHER, "rl_teacher_weight": 0.3, "rl_reward_weight": 0.5}
FUSED = {"rl_fused_output_layer": True, "grpo_entropy_term_weight": 0.01}
PROMPTS = {"prompts": 3}
SHARED_PROMPTS = PROMPTS | {"rl_share_prompts": True}
LORA = {"lora_rank": 4, "grpo_kl_beta": 0.1}
"""The reference is the model without the adapters."""
FEW = {"samples": 1}
"""Of two replicas one has no micro-batch."""
MANY = {"samples": 20}
"""Five micro-batches in an update, so that stages have some in steady state."""
LATENT, LATENT_EXPERTS = (changes | {"num_layers": 4} for changes in (LATENT, LATENT_EXPERTS))
LATENT_EXPERTS |= {"moe_layer_freq": "([0]*1+[1]*3)"}
DELTA, DELTA_EXPERTS = (
    changes | {"num_layers": 4, "linear_attention_freq": 2} for changes in (DELTA, DELTA_EXPERTS)
)
DELTA_EXPERTS |= {"num_query_groups": 1}
"""Fewer than two tensor-parallel ranks."""
CASES: dict[str, dict[str, Any]] = {
    "plain": MANY,
    "tied": TIED,
    "fused": FUSED,
    "recomputed": RECOMPUTED,
    "attention recomputed": {"recompute_granularity": "selective"},
    "experts": EXPERTS,
    "experts, loop": EXPERTS | {"no_moe_grouped_gemm": True},
    "experts, loop, overlaps": EXPERTS | OVERLAP | {"no_moe_grouped_gemm": True},
    "experts, recomputed": EXPERTS | RECOMPUTED,
    "experts, few": EXPERTS | FEW,
    "experts, distributed": EXPERTS | {"use_distributed_optimizer": True},
    "experts, overlaps": EXPERTS | OVERLAP,
    "experts, overlaps, few": EXPERTS | OVERLAP | FEW,
    "balanced": EXPERTS | BALANCED,
    "balanced, few": EXPERTS | BALANCED | FEW,
    "balanced by batch": EXPERTS | BALANCED | {"moe_router_load_balancing_type": "aux_loss"},
    "balanced, few, overlaps": EXPERTS | BALANCED | FEW | OVERLAP,
    "replayed": EXPERTS | {"rl_router_replay": True},
    "lora": LORA,
    "lora, recomputed": LORA | RECOMPUTED,
    "lora, overlaps": LORA | OVERLAP,
    "lora, some, tied, biases": LORA | TIED | {
        "lora_targets": ["q_proj", "v_proj", "mlp"], "disable_bias_linear": False,
    },
    "lora, experts": LORA | EXPERTS,
    "lora, experts, loop": LORA | EXPERTS | {"no_moe_grouped_gemm": True},
    "lora, experts, overlaps": LORA | EXPERTS | OVERLAP,
    "taught": TAUGHT,
    "experts, taught": EXPERTS | TAUGHT | {"rl_router_replay": True},
    "taught in the loss": TAUGHT | {"rl_teacher_as": "loss", "rl_fused_output_layer": True},
    "more on the last": UNEVEN | {"parallel": {"decoder_first_pipeline_num_layers": 2}},
    "windows": WINDOWS,
    "sinks": SINKS,
    "sinks, loop": SINKS | {"no_moe_grouped_gemm": True},
    "sinks, attention recomputed": SINKS | {"recompute_granularity": "selective"},
    "windows, recomputed": WINDOWS | RECOMPUTED,
    "post norms": POST_NORMS,
    "mixed": MIXED | BALANCED,
    "mixed, overlaps": MIXED | BALANCED | OVERLAP,
    "latent": LATENT,
    "latent, attention recomputed": LATENT | {"recompute_granularity": "selective"},
    "latent, experts": LATENT_EXPERTS | {"q_lora_rank": False},
    "prompts, latent": PROMPTS | LATENT,
    "shared, latent": SHARED_PROMPTS | LATENT,
    "delta": DELTA,
    "delta, recomputed": DELTA | RECOMPUTED,
    "delta, distributed": DELTA | {"use_distributed_optimizer": True},
    "delta, experts": DELTA_EXPERTS,
    "lora, delta": LORA | DELTA,
    "prompts": PROMPTS,
    "prompts, fused": PROMPTS | FUSED,
    "prompts, experts": PROMPTS | EXPERTS,
    "prompts, windows": PROMPTS | WINDOWS,
    "shared": SHARED_PROMPTS,
    "shared, fused": SHARED_PROMPTS | FUSED,
    "shared, recomputed": SHARED_PROMPTS | RECOMPUTED,
    "shared, attention recomputed": SHARED_PROMPTS | {"recompute_granularity": "selective"},
    "shared, overlaps": SHARED_PROMPTS | OVERLAP,
    "shared, experts": SHARED_PROMPTS | EXPERTS,
    "shared, windows": SHARED_PROMPTS | WINDOWS,
    "odd bins": MANY | {"rl_sequence_packing_bin_size": 49},
    "few": FEW,
    "few, tied": FEW | TIED,
    "distributed": MANY | {"use_distributed_optimizer": True},
    "overlaps": MANY | OVERLAP,
    "overlaps, few": OVERLAP | FEW,
    "overlaps, few, tied": OVERLAP | FEW | TIED,
}
REFERENCE = {
    "latent, attention recomputed": "latent", "shared, latent": "prompts, latent",
    "delta, recomputed": "delta", "delta, distributed": "delta",
    "sinks, loop": "sinks", "sinks, attention recomputed": "sinks",
    "odd bins": "plain", "distributed": "plain",
    "overlaps": "plain", "overlaps, few": "few", "overlaps, few, tied": "few, tied",
    "lora, recomputed": "lora", "lora, overlaps": "lora",
    "lora, experts, loop": "lora, experts", "lora, experts, overlaps": "lora, experts",
    "experts, loop": "experts", "experts, loop, overlaps": "experts", "experts, distributed": "experts",
    "experts, overlaps": "experts", "experts, overlaps, few": "experts, few",
    "balanced, few, overlaps": "balanced, few", "mixed, overlaps": "mixed",
    "shared": "prompts", "shared, recomputed": "prompts", "shared, attention recomputed": "prompts",
    "shared, overlaps": "prompts", "shared, fused": "prompts, fused", "shared, experts": "prompts, experts",
    "shared, windows": "prompts, windows",
}  # fmt: skip
"""Compared with another case on one rank."""
STAGES = {"pipeline_model_parallel_size": 2}
VIRTUAL = STAGES | {"num_virtual_stages_per_pipeline_rank": 2}
SHARED = {"expert_model_parallel_size": 2}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CONTEXT = {"context_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "one rank": (
        1, {},
        [
            "shared", "shared, fused", "shared, recomputed", "shared, attention recomputed", "shared, experts",
            "shared, windows", "sinks, loop", "sinks, attention recomputed", "lora, recomputed", "lora, experts, loop",
            "shared, latent", "latent, attention recomputed", "delta, recomputed",
        ],
    ),
    "DP2": (2, {}, ["shared", "shared, overlaps", "delta, distributed"]),
    "TP2": (2, {"tensor_model_parallel_size": 2}, ["lora", "latent", "delta", "lora, delta"]),
    "TP2, sequence-parallel": (
        2, TENSOR,
        [
            "shared", "shared, fused", "shared, experts", "mixed", "lora, recomputed", "lora, some, tied, biases",
            "lora, experts", "lora, experts, loop", "latent, attention recomputed", "latent, experts",
            "delta, experts",
        ],
    ),
    "PP2": (
        2, STAGES,
        [
            "plain", "tied", "fused", "recomputed", "experts", "balanced", "balanced by batch", "replayed",
            "more on the last", "few", "taught", "windows", "sinks", "mixed",
            "latent, experts", "delta",
        ],
    ),
    "PP2 x VPP2": (2, VIRTUAL, ["plain", "tied", "recomputed", "few", "replayed", "taught", "windows"]),
    "PP2 x DP2": (4, STAGES, ["distributed", "overlaps", "overlaps, few, tied", "few, tied", "lora, overlaps"]),
    "TP2 x PP2, sequence-parallel": (
        4, STAGES | TENSOR,
        ["tied", "replayed", "taught in the loss", "odd bins", "windows", "post norms",
         "lora, some, tied, biases"],
    ),
    "PP2 x VPP2 x DP2": (4, VIRTUAL, ["overlaps", "overlaps, few", "overlaps, few, tied"]),
    "PP4": (4, {"pipeline_model_parallel_size": 4}, ["plain", "tied"]),
    "EP2": (
        2, SHARED,
        [
            "experts", "replayed", "experts, recomputed", "experts, few", "experts, overlaps", "experts, loop",
            "balanced", "experts, taught", "shared, experts", "mixed, overlaps",
            "lora, experts, overlaps", "lora, experts, loop", "latent, experts",
            "delta, experts",
        ],
    ),
    "EP2 x DP2": (
        4, SHARED,
        [
            "experts", "experts, distributed", "experts, overlaps, few", "experts, loop, overlaps",
            "balanced, few, overlaps",
        ],
    ),
    "TP2 x EP2, ETP1": (
        2, SHARED | TENSOR | {"expert_tensor_parallel_size": 1},
        ["experts", "experts, few", "replayed", "balanced", "sinks", "sinks, loop", "mixed", "lora, experts"],
    ),
    "TP2 x EP2, ETP2": (4, SHARED | TENSOR, ["experts", "experts, overlaps, few", "experts, loop"]),
    "EP2 x PP2": (4, SHARED | STAGES, ["experts", "experts, few", "experts, overlaps", "balanced"]),
    "EP2 x PP2 x VPP2": (4, SHARED | VIRTUAL, ["experts", "experts, few", "experts, overlaps", "balanced"]),
    "TP2 x EP4, ETP1": (
        4, TENSOR | {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1},
        ["experts", "experts, few", "experts, overlaps"],
    ),
    "CP2": (
        2, CONTEXT,
        [
            "plain", "tied", "fused", "recomputed", "attention recomputed", "overlaps", "few", "taught", "windows",
            "windows, recomputed", "sinks", "post norms", "mixed", "lora", "latent", "latent, experts",
        ],
    ),
    "CP2 x TP2, sequence-parallel": (
        4, CONTEXT | TENSOR, ["tied", "fused", "replayed", "balanced by batch", "odd bins"],
    ),
    "CP2 x PP2": (4, CONTEXT | STAGES, ["tied", "fused", "overlaps, few, tied"]),
    "CP2 x DP2": (4, CONTEXT, ["plain", "overlaps", "overlaps, few"]),
    "CP4": (4, {"context_parallel_size": 4}, ["plain", "fused"]),
    "CP2 x EP2": (2, CONTEXT | SHARED, ["experts", "replayed", "experts, few", "experts, overlaps", "balanced"]),
}  # fmt: skip
"""Ranks, sizes, cases. Where two kinds of parallelism meet, a case that another one contains is left out."""
LONG = (
    "PP2 x VPP2 x DP2", "PP4", "EP2 x PP2", "EP2 x PP2 x VPP2", "TP2 x EP4, ETP1", "CP2 x DP2", "CP4",
)  # fmt: skip
CONTAINED = {
    "one rank": {"shared, fused", "shared, experts", "sinks, loop", "lora, experts, loop"},
    "TP2": {"lora", "delta"},
    "TP2, sequence-parallel": {
        "shared", "shared, experts", "mixed", "lora, recomputed", "lora, experts", "lora, experts, loop",
        "latent, attention recomputed",
    },
    "PP2": {"tied", "fused", "recomputed", "experts", "balanced", "windows"},
    "PP2 x VPP2": {"tied", "taught", "windows"},
    "PP2 x DP2": {"distributed", "few, tied", "lora, overlaps"},
    "TP2 x PP2, sequence-parallel": {"tied", "replayed", "windows", "odd bins", "post norms"},
    "EP2": {
        "experts", "replayed", "experts, few", "experts, overlaps", "experts, loop", "balanced", "latent, experts",
        "delta, experts",
    },
    "EP2 x DP2": {"experts", "experts, distributed", "experts, overlaps, few"},
    "TP2 x EP2, ETP1": {"experts", "replayed", "balanced", "sinks"},
    "TP2 x EP2, ETP2": {"experts"},
    "CP2": {"plain", "tied", "recomputed", "windows", "taught", "latent"},
    "CP2 x TP2, sequence-parallel": {"tied", "replayed", "fused"},
    "CP2 x PP2": {"tied"},
    "CP2 x EP2": {"experts", "experts, few", "balanced"},
}
"""Left to ``--long``, as another case of the layout, or the same case of another one, has its parts: "windows" is
tied, and "sinks" has windows; "mixed" has "balanced", and both have experts; "experts, taught" replays; overlaps have
the distributed optimizer. test_parity.py has post norms on tensor-parallel ranks."""
TOLERANCE = 2e-5
NOT_SHARED = frozenset({"actor/expert_load_max"})
"""Counts what routers saw, so what is shared once."""


def cases_of(layout: str, with_long: bool) -> list[str]:
    """Names of the cases that ``layout`` is tried on."""
    cases = LAYOUTS[layout][2]
    if with_long:
        return cases
    return [case for case in cases if layout not in LONG and case not in CONTAINED.get(layout, ())]


def references(with_long: bool) -> list[str]:
    """Names of the cases that one rank computes for the others to be compared with."""
    compared = {REFERENCE.get(case, case) for layout in LAYOUTS for case in cases_of(layout, with_long)}
    return [case for case in CASES if case in compared]


Found = tuple[list[Any], dict[str, dict[str, torch.Tensor]]]
"""Metrics of every rank, and the tensors of all ranks together."""


def of_all_ranks(folder: Path, case: str, world_size: int) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors that the ranks have written; what several have is the same."""
    together: dict[str, dict[str, torch.Tensor]] = {}
    for rank in range(world_size):
        for kind, tensors in torch.load(folder / f"{case}.{rank}.pt", weights_only=True).items():
            for name, values in tensors.items():
                known = together.setdefault(kind, {}).setdefault(name, values)
                if "gradients" not in kind:  # without samples a replica's copy of a tied gradient is the sum, too
                    torch.testing.assert_close(known, values, rtol=0, atol=1e-6)
    return together


def assert_equal(
    found: Found, on_one_rank: Found, without: frozenset[str] = frozenset(), tolerance: float = TOLERANCE
) -> None:
    """Metrics but those of ``without`` within 1e-4, weights within the ``tolerance``, gradients within it of the
    largest of their parameter, log-probs within twice and values within four times of it."""
    (metrics, tensors), ((wanted,), expected) = found, on_one_rank
    assert all(rank == metrics[0] for rank in metrics)
    for own, one in zip(metrics[0], wanted, strict=True):
        assert own.keys() == one.keys()
        for name in one.keys() - without:
            value = one[name]
            assert own[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    assert expected.keys() >= tensors.keys() >= {"logprobs"}
    for kind, named in tensors.items():
        assert named.keys() == expected[kind].keys()
        for name, values in named.items():
            difference = (values - expected[kind][name]).abs().max().item()
            # Log-probs of up to 20 nats, and sums of as many terms: by weights that differ by so much.
            scale = 4.0 if kind == "values" else 2.0 if "logprobs" in kind else 1.0
            if "gradients" in kind:
                scale = expected[kind][name].abs().max().clamp_min(1e-2).item()
            assert difference <= tolerance * scale, f"{kind} of {name}"


class Results:
    """Runs a layout when a test first asks for it."""

    def __init__(self, folder: Path, with_long: bool) -> None:
        self._folder, self._with_long = folder, with_long
        self._metrics: dict[str, list[dict[str, Any]]] = {}

    def of(self, layout: str | None, case: str) -> Found:
        """``layout`` None is one rank."""
        world_size, parallel, _ = LAYOUTS[layout] if layout else (1, {}, [])
        names = cases_of(layout, self._with_long) if layout else references(self._with_long)
        folder = self._folder / str(layout)
        if str(layout) not in self._metrics:
            folder.mkdir()
            cases = {name: CASES[name] for name in names}
            if layout is None:
                cases = {name: {k: v for k, v in changes.items() if k != "parallel"} for name, changes in cases.items()}
            self._metrics[str(layout)] = run_ranks(
                "tests.distributed.layout_programs:train", world_size, timeout=600,
                folder=str(folder), parallel=parallel, cases=cases,
            )  # fmt: skip
        return [metrics[case] for metrics in self._metrics[str(layout)]], of_all_ranks(folder, case, world_size)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("layouts"), request.config.getoption("--long"))


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        pytest.param(layout, case, marks=[] if case in cases_of(layout, with_long=False) else [pytest.mark.long])
        for layout, (_, _, cases) in LAYOUTS.items()
        for case in cases
    ],
)
def test_as_on_one_rank(results: Results, layout: str, case: str) -> None:
    without = NOT_SHARED if CASES[case].get("rl_share_prompts") else frozenset()
    # The delta rule is less well conditioned than attention: docs/measurements/families.md.
    tolerance = 5e-5 if case.startswith("delta") else TOLERANCE
    assert_equal(results.of(layout, case), results.of(None, REFERENCE.get(case, case)), without, tolerance)
