"""Rollouts with experts over ranks complete what one rank completes, however unequal the ranks' work is."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks

SHARED = {"expert_model_parallel_size": 2}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "EP2": (2, SHARED),
    "TP2 x EP2, ETP1": (2, SHARED | TENSOR | {"expert_tensor_parallel_size": 1}),
    "TP2 x EP2, ETP2": (4, SHARED | TENSOR),
    "TP2": (2, TENSOR),
    "EP2, loop": (2, SHARED),
    "CP2 x EP2": (2, SHARED | {"context_parallel_size": 2}),
    "EP4": (4, {"expert_model_parallel_size": 4}),
    "TP2 x EP4, ETP1": (4, TENSOR | {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}),
}
LONG = ("EP4", "TP2 x EP4, ETP1", "EP2, loop")
"""Loops of experts are quantised on EP2, too."""
DEALS = {"uneven": [0, 0, 0, 0, 1], "one has all": [0, 0, 0, 0, 0]}
"""The replica of each group."""


@functools.cache
def one(**given: Any) -> dict[str, Any]:
    """What one rank has with the same settings."""
    program = "tests.distributed.expert_programs:complete"
    return run_ranks(program, 1, parallel={}, deals={"all": [0] * 5}, **given)[0]["all"]


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in LAYOUTS]
)
def test_as_on_one_rank(layout: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    replicas = world_size // parallel.get("tensor_model_parallel_size", 1)
    deals = DEALS if replicas > 1 else {"all": [0] * 5}
    program = "tests.distributed.expert_programs:complete"
    ranks = run_ranks(program, world_size, parallel=parallel, deals=deals, no_moe_grouped_gemm="loop" in layout)
    for deal in deals:
        agree([rank[deal] for rank in ranks], one())
    if replicas > 1:
        assert ranks[-1]["one has all"]["decode steps"] == 0  # it took part all the same
        assert ranks[0]["one has all"]["answered calls"] == 0, "the call was cancelled"


LINEARS = {
    "mixed": "layers.2.mlp.shared_experts.linear_fc2",
    "sinks": "layers.1.mlp.experts.local_experts.0.linear_fc1",
    "latent, experts": "layers.1.self_attention.linear_kv_up_proj",
}
"""One that is quantised, by the shape."""


@pytest.mark.parametrize(
    ("shape", "layout", "recipe"),
    [
        ("mixed", "EP2", "int8"),
        ("sinks", "EP2", "int8"),
        ("latent, experts", "TP2 x EP2, ETP1", "none"),
        # Their parts meet in the three above.
        pytest.param("mixed", "TP2 x EP2, ETP1", "none", marks=pytest.mark.long),
        pytest.param("sinks", "TP2 x EP2, ETP1", "none", marks=pytest.mark.long),
        pytest.param("latent, experts", "EP2", "int8", marks=pytest.mark.long),
    ],
)
def test_layers_beyond_routed_experts(shape: str, layout: str, recipe: str) -> None:
    """Shared experts, sigmoid scores, a bias, groups, and a dense layer that has no part in the ranks' exchange; or
    sinks, windows and biases, or latent attention."""
    world_size, parallel = LAYOUTS[layout]
    program, given = "tests.distributed.expert_programs:complete", {"shape": shape, "recipe": recipe}
    deals = DEALS if layout == "EP2" else {"all": [0] * 5}
    ranks = run_ranks(program, world_size, parallel=parallel, deals=deals, **given)
    for deal in deals:
        agree([rank[deal] for rank in ranks], one(**given))
        quantised = [name for name, ran, _ in ranks[0][deal]["audit"] if ran.startswith("int8")]
        assert (LINEARS[shape] in quantised) == (recipe == "int8")


def test_graphs_of_experts_over_ranks() -> None:
    """A tape in a graph's place: both ranks record and replay together, also where one has no sequences at all."""
    program = "tests.distributed.expert_programs:complete"
    ranks = run_ranks(program, 2, parallel=SHARED, deals=DEALS, taped_steps=True)
    for deal in DEALS:
        agree([rank[deal] for rank in ranks], one())
        (recorded, replayed), other = (rank[deal]["tapes"] for rank in ranks)
        assert [recorded, replayed] == other
        assert replayed >= ranks[0][deal]["decode steps"] > 0
        assert recorded == 2, "batches of 4 and of 8"


@pytest.mark.parametrize(
    # The second has stacks too, as have "mixed" and "sinks" on EP2 above.
    "layout", ["EP2, loop", "TP2 x EP2, ETP1", pytest.param("EP2", marks=pytest.mark.long)]
)
def test_quantised_as_on_one_rank(layout: str) -> None:
    """Also where a rank has no prompts: of its dense layers, and of experts that see zeros alone, no verdict.

    Tensor-parallel ranks would scale the inputs of attention's projection by themselves, so it stays as it is there.
    """
    world_size, parallel = LAYOUTS[layout]
    program, given = "tests.distributed.expert_programs:complete", dict[str, Any](recipe="int8")
    deals = {"all": [0] * 5} if "TP" in layout else DEALS
    given["skip"] = ("*.linear_proj",) if "TP" in layout else ()
    loop = {"no_moe_grouped_gemm": "loop" in layout}
    ranks = run_ranks(program, world_size, parallel=parallel, deals=deals, **given, **loop)
    experts = [f"mlp.experts.local_experts.{expert}.linear_fc{number}" for expert in range(4) for number in (1, 2)]
    names = ["self_attention.linear_proj", "self_attention.linear_qkv", *experts]
    for deal in deals:
        agree([rank[deal] for rank in ranks], one(**given))
        for rank in ranks:
            rows = rank[deal]["audit"]
            assert [name for name, *_ in rows] == [f"layers.{layer}.{name}" for layer in range(2) for name in names]
            plain = {name for name, ran, _ in rows if ran != "int8, channel x token"}
            assert all(name.endswith("linear_proj") and given["skip"] for name in plain)
            assert all(calls for *_, calls in rows)


SAID = "sampled tokens depend on the tensor-parallel size"
"""In docs/quantization.md."""


@pytest.mark.parametrize("recipe", ["int8", pytest.param("fp8", marks=pytest.mark.long)])
def test_quantised_experts_that_are_cut(recipe: str) -> None:
    """Scales are those of a rank's part alone, stacked as one by one, and the document says so."""
    program = "tests.distributed.expert_programs:complete"
    given = {"deals": {"all": [0] * 5}, "recipe": recipe, "samples": 3}
    loop = run_ranks(program, 2, parallel=TENSOR, **given, no_moe_grouped_gemm=True)
    for rank in run_ranks(program, 2, parallel=TENSOR, **given):
        agree([rank["all"]], loop[0]["all"])
        assert [row[:2] for row in rank["all"]["audit"]] == [row[:2] for row in loop[0]["all"]["audit"]]
    whole = one(recipe=recipe, samples=3)
    samples = [[a for answers in found["answers"].values() for a in answers] for found in (loop[0]["all"], whole)]
    others = sum(ours[0] != theirs[0] for ours, theirs in zip(*samples, strict=True))
    text = (Path(__file__).parents[2] / "docs" / "quantization.md").read_text(encoding="utf-8")
    assert (SAID in text) == (others > 0), f"{others} samples have other tokens than one rank's"


def test_a_rank_whose_layers_all_stay_as_they_are_takes_part() -> None:
    """Copies of the experts of the other rank alone."""
    skip = ["*linear_proj", "*linear_qkv", "*.local_experts.[01].*"]
    deals = {"uneven": DEALS["uneven"]}
    first, second = run_ranks(
        "tests.distributed.expert_programs:complete", 2, parallel=SHARED, deals=deals, recipe="int8", skip=skip
    )
    assert first["uneven"]["audit"] == second["uneven"]["audit"]
    quantised = [name for name, ran, _ in first["uneven"]["audit"] if ran.startswith("int8")]
    assert [name.split(".")[5] for name in quantised] == ["2", "2", "3", "3"] * 2


@pytest.mark.parametrize("loop", [False, pytest.param(True, marks=pytest.mark.long)])
def test_what_one_rank_cannot_quantise_all_refuse(loop: bool) -> None:
    program = "tests.distributed.expert_programs:refuse"
    first, second = run_ranks(program, 2, parallel=SHARED, no_moe_grouped_gemm=loop)
    assert first == second
    assert "layers.0.mlp.experts.local_experts.3.linear_fc2 holds NaN" in first


@pytest.mark.parametrize(
    ("recipe", "chunks", "taped"),
    [
        ("none", 2, True),
        # test_stages.py has whole stages of one copy
        pytest.param("none", None, False, marks=pytest.mark.long),
        pytest.param("int8", 2, False, marks=pytest.mark.long),
    ],
)
def test_on_stages_as_on_one_rank(recipe: str, chunks: int | None, taped: bool) -> None:
    """Four layers on two stages, whole and interleaved, of two copies that share experts. test_stages.py has int8.

    With tapes all make as many steps, in as many parts as a rank has chunks.
    """
    program, given = "tests.distributed.expert_programs:complete", {"num_layers": 4, "recipe": recipe}
    parallel = SHARED | {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": chunks}
    ranks = run_ranks(program, 4, parallel=parallel, deals=DEALS, **given, taped_steps=taped)
    for deal in DEALS:
        agree([rank[deal] for rank in ranks], one(**given))
        assert {len(rank[deal]["audit"]) for rank in ranks} == {0 if recipe == "none" else 40}
        (recorded, replayed), *others = (rank[deal]["tapes"] for rank in ranks)
        assert all(other == [recorded, replayed] for other in others)
        if taped:
            assert recorded == 2 * chunks, "two lanes of four rows"
            assert replayed >= chunks * ranks[0][deal]["decode steps"] > 0
    assert [rank["one has all"]["decode steps"] > 0 for rank in ranks] == [True, False] * 2


def agree(ranks: list[dict[str, Any]], one: dict[str, Any]) -> None:
    """Between them the ranks have answered what one rank has."""
    answers = [(rank["layers"], group, found) for rank in ranks for group, found in rank["answers"].items()]
    assert {group for _, group, _ in answers} == set(one["answers"])
    for layers, group, found in answers:
        for (tokens, logprobs, experts), (wanted, expected, chosen) in zip(found, one["answers"][group], strict=True):
            assert (tokens, experts) == (wanted, [[token[layer] for layer in layers] for token in chosen])
            assert logprobs == pytest.approx(expected, abs=1e-5)
