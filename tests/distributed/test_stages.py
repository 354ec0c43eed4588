"""Rollouts on pipeline stages, and of context-parallel ranks: the tokens and log-probs of one rank, to the bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.tiny import DELTA, SINKS, WINDOWS

STAGES = {"pipeline_model_parallel_size": 2}
PAGES = {"attention_backend": "paged"}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 24, "add_qkv_bias": False, "qk_layernorm": True}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"flags": {"untie_embeddings_and_output_weights": False}},
    "more layers on the first": {
        "flags": {"num_layers": 5}, "parallel": {"decoder_first_pipeline_num_layers": 3},
    },
    "biases, filtered, tempered": {
        "flags": {"disable_bias_linear": False, "normalization": "LayerNorm"},
        "requests": {"temperature": 0.7, "top_k": 9, "top_p": 0.9},
    },
    "greedy": {"requests": {"greedy": True}},
    "stop strings": {"requests": {"stop": ("a", "Bc")}},
    "chunked prompts": {"options": {"prefill_token_budget": 8}, "requests": {"longest_prompt": 30}},
    "pages": {"flags": PAGES, "options": {"block_size": 16}},
    "pages, preempted": {
        "flags": PAGES | {"num_layers": 5},
        "parallel": {"decoder_first_pipeline_num_layers": 1},
        # 5 fp32 layers of 2 groups and heads of 8: 640 bytes a token, 10 KiB a page of 16
        "options": {"block_size": 16, "kv_overcommit": 4.0, "cache_budget_gb": 24 * 10 / 2**20},
        "requests": {"count": 8, "max_new_tokens": 40},
    },
    "prefixes": {"options": {"max_sequence_length": 96}, "requests": {"longest_prompt": 24}, "turns": True},
    "prefixes in pages": {
        "flags": PAGES, "options": {"max_sequence_length": 96, "block_size": 16},
        "requests": {"longest_prompt": 24}, "turns": True, "again": True,
    },
    "few rows": {"options": {"max_batch_size": 5}},
    "rows within a budget": {
        "flags": {"num_layers": 5}, "parallel": {"decoder_first_pipeline_num_layers": 3},
        "options": {"cache_budget_gb": 6.5 * 640 * 64 / 2**30},
    },
    "cancelled": {"cancels": True, "options": {"decode_steps_per_sync": 1, "prefill_token_budget": 24}},
    "interrupted": {"pauses": True, "options": {"decode_steps_per_sync": 3}},
    "int8": {"recipe": "int8"},
    "int8 on the last stage": {"recipe": "int8", "skip": ["first:2"]},
    "windows": {"flags": WINDOWS, "requests": {"longest_prompt": 20}},
    "windows, int8": {"flags": WINDOWS, "recipe": "int8"},
    "experts, sinks, int8": {"flags": SINKS, "recipe": "int8", "requests": {"longest_prompt": 20}},
    "recurrent states": {
        "flags": DELTA | {"num_layers": 4, "linear_attention_freq": 2}, "requests": {"longest_prompt": 20},
        "options": {"prefill_token_budget": 8, "max_sequence_length": 96}, "turns": True,
    },
    "recurrent states in pages": {
        "flags": DELTA | PAGES | {"num_layers": 4, "linear_attention_freq": 2}, "requests": {"longest_prompt": 40},
        "options": {"block_size": 16, "max_sequence_length": 112}, "turns": True,
    },
    "windows, prefixes in pages": {
        "flags": WINDOWS | PAGES, "options": {"max_sequence_length": 96, "block_size": 16},
        "requests": {"longest_prompt": 24}, "turns": True,
    },
    "experts": {"flags": EXPERTS},
    "experts, few tokens": {
        "flags": EXPERTS, "requests": {"count": 3, "num_samples": 1, "max_new_tokens": 30}, "again": True,
    },
    "experts, recorded": {"flags": EXPERTS | {"rl_router_replay": True}, "turns": True,
                          "options": {"max_sequence_length": 96}},
    "experts within a budget": {
        "flags": EXPERTS | {"rl_router_replay": True, "num_layers": 5},
        "parallel": {"decoder_first_pipeline_num_layers": 3},
        # 10 rows of three layers' keys and values, but of two layers' experts
        "options": {"cache_budget_gb": 10 * (3 * 128 + 2 * 2) * 64 / 2**30},
    },
}  # fmt: skip
TAPED = ["plain", "pages", "interrupted", "int8", "windows", "experts, recorded", "recurrent states"]
CASES |= {f"{name}, taped": CASES[name] | {"tapes": True} for name in TAPED}
"""On stages, a tape in the place of each graph; on one rank as without."""
CASES["plain, taped, refused on the first"] = CASES["plain, taped"] | {"refused": 0}
VIRTUAL = STAGES | {"num_virtual_stages_per_pipeline_rank": 2}
TENSOR = {"tensor_model_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "one": (1, {}, list(CASES)),
    "TP2": (2, TENSOR, ["plain", "tied", "int8, taped", "recurrent states in pages"]),
    "PP2": (2, STAGES, list(CASES)),
    "PP2 x VPP2": (
        2, VIRTUAL,
        [
            "plain", "tied", "prefixes", "cancelled", "interrupted", "experts, recorded", "plain, taped", "int8, taped",
            "experts, recorded, taped",
        ],
    ),
    "TP2 x PP2": (4, STAGES | TENSOR, ["plain", "tied", "int8, taped", "recurrent states in pages"]),
    # Context-parallel ranks are replicas, and each completes all.
    "CP2": (2, CONTEXT, ["plain", "int8"]),
    "CP2 x TP2, sequence-parallel": (4, CONTEXT | TENSOR | {"sequence_parallel": True}, ["plain"]),
    "CP2 x PP2": (4, CONTEXT | STAGES, ["int8"]),
    "PP4": (4, {"pipeline_model_parallel_size": 4}, ["plain", "prefixes", "plain, taped"]),
}
"""Ranks, sizes, cases."""
COMPARED = {"TP2 x PP2": "TP2", "CP2 x TP2, sequence-parallel": "TP2"}
"""With another layout than one rank."""
LONG = ("PP4", "CP2 x TP2, sequence-parallel")
CONTAINED = {
    "PP2": {
        "tied", "greedy", "pages", "prefixes in pages", "interrupted", "int8", "windows", "windows, int8",
        "recurrent states", "recurrent states in pages", "experts", "experts, recorded",
    },
    "PP2 x VPP2": {"plain", "cancelled", "experts, recorded", "plain, taped"},
    "TP2 x PP2": {"plain", "tied", "recurrent states in pages"},
}
"""Left to ``--long``: on these stages another case has this one's parts, most with tapes, or more stages have it."""


class Results(dict[str, list[dict[str, Any]]]):
    """Of each rank, by layout."""

    with_long = False


TOLERANCES = dict.fromkeys((name for name in CASES if name.startswith("experts")), 1e-5)
TOLERANCES |= dict.fromkeys(("interrupted", "interrupted, taped"), 5e-6)
TOLERANCES |= dict.fromkeys((name for name in CASES if name.startswith("recurrent")), 1e-4)
"""An expert may get fewer than `FEWEST_ROWS` tokens: its products depend on who else is in the lane. Lanes are
interrupted at other tokens, and a prefill adds up in another order than decode steps. Chunks of the delta rule are
solved together with those of other prompts, and stages go on from ends of prompts where one rank does from turns."""


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Results:
    """Of the layouts that a test has asked for."""
    found = Results()
    found.with_long = request.config.getoption("--long")
    return found


def cases_of(layout: str, with_long: bool) -> list[str]:
    """Names of the cases that ``layout`` is tried on, or that others are compared with."""
    if layout in COMPARED.values() or layout == "one":
        others = [other for other in LAYOUTS if other not in ("one", "TP2") and COMPARED.get(other, "one") == layout]
        compared = {reference(case) for other in others for case in cases_of(other, with_long)}
        return [case for case in CASES if case in compared]
    if with_long:
        return LAYOUTS[layout][2]
    return [case for case in LAYOUTS[layout][2] if layout not in LONG and case not in CONTAINED.get(layout, ())]


def reference(case: str) -> str:
    """What it is without stages, where nothing is taped."""
    return case.partition(", taped")[0]


def of(results: Results, layout: str) -> list[dict[str, Any]]:
    ranks, parallel, _ = LAYOUTS[layout]
    if layout not in results:
        names = cases_of(layout, with_long=results.with_long)
        cases = {name: CASES[name] for name in names}
        program = "tests.distributed.stage_programs:roll_out"
        results[layout] = run_ranks(program, ranks, timeout=600, parallel=parallel, cases=cases)
    return results[layout]


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        pytest.param(layout, case, marks=[] if case in cases_of(layout, with_long=False) else [pytest.mark.long])
        for layout, (_, _, cases) in LAYOUTS.items()
        if layout not in ("one", "TP2")
        for case in cases
    ],
)
def test_as_without_stages(results: Results, layout: str, case: str) -> None:
    one, tolerance = of(results, COMPARED.get(layout, "one"))[0][reference(case)], TOLERANCES.get(case, 0.0)
    for number, rank in enumerate(of(results, layout)):
        for seed in (1, 2):
            for what in ("tokens", "endings"):
                assert rank[case][f"{what} {seed}"] == one[f"{what} {seed}"]
            for own, wanted in zip(rank[case][f"logprobs {seed}"], one[f"logprobs {seed}"], strict=True):
                assert own == (wanted if tolerance == 0 else pytest.approx(wanted, abs=tolerance))
        assert rank[case]["audit"] == one["audit"]
        if "taped" in case:
            # All steps but those of the first rollout on 8-bit copies, which the audit looks at.
            chunks = LAYOUTS[layout][1].get("num_virtual_stages_per_pipeline_rank", 1)
            least = [chunks * steps for steps in rank[case]["steps"]]
            least[0] *= "int8" not in case
            if "refused" in case and number == 0:
                least = [0, 0]
            replays = rank[case]["replays"]
            if "interrupted" in case:  # whose count of steps begins anew each time
                assert min(replays) > 0
            else:
                assert replays == least and min(rank[case]["steps"]) > 0


@pytest.mark.parametrize("layout", ["one", "PP2"])
def test_a_rollout_leaves_no_trace_in_the_next(results: Results, layout: str) -> None:
    """With fewer tokens than `FEWEST_ROWS` idle rows are computed, too: experts rounded by what these had held."""
    repeated = [report for rank in of(results, layout) for report in rank.values() if "tokens again" in report]
    assert repeated
    for report in repeated:
        assert report["logprobs again"] == report["logprobs 1"]


@pytest.mark.parametrize("layout", ["PP2", "PP2 x VPP2"])
def test_each_stage_has_the_experts_of_its_layers(results: Results, layout: str) -> None:
    case = "experts, recorded, taped"
    one, ranks = of(results, "one")[0][reference(case)], of(results, layout)
    for seed in ("experts 1", "experts 2"):
        assert sorted(layer for rank in ranks for layer in rank[case][seed]) == ["0", "1", "2", "3"]
        for rank in ranks:
            for layer, experts in rank[case][seed].items():
                assert experts == one[seed][layer]
        assert one[seed]["0"] != one[seed]["1"]


def test_the_cases_are_what_they_are_called(results: Results) -> None:
    """With the defaults as many lanes as stages; all stages have the rows that the fullest has room for."""
    first, second = of(results, "PP2")
    assert {name: report["lanes"] for name, report in first.items() if report["lanes"] != 2} == {"few rows": 1}
    assert first["rows within a budget"]["rows"] == second["rows within a budget"]["rows"] == 10  # 6.5 x 5 / 3
    assert first["experts within a budget"]["rows"] == second["experts within a budget"]["rows"] == 9
    assert all(first[case]["counts"] == second[case]["counts"] for case in first)
    assert first["pages, preempted"]["counts"]["preemptions"] > 0
    for case in ("prefixes", "windows, prefixes in pages", "recurrent states, taped"):
        assert first[case]["counts"]["reused_tokens"] > 0
    assert first["cancelled"]["tokens 1"] == first["plain"]["tokens 1"]
    # Of the six calls some may be complete before they are cancelled: that depends on the rows they share a burst with.
    assert 6 * 3 <= first["cancelled"]["counts"]["completions"] < 6 * 3 + 6
    assert len(first["int8, taped"]["audit"]) == 16
    assert {ran for _, ran in first["int8, taped"]["audit"]} == {"int8, channel x token"}


def test_what_one_stage_cannot_quantise_all_refuse() -> None:
    """One that raised alone would leave the other waiting in the rollout."""
    first, second = run_ranks("tests.distributed.stage_programs:refuse", 2, timeout=300, parallel=STAGES)
    assert first == second
    not_finite, other_format = first
    assert "layers.3.mlp.linear_fc2 holds NaN" in not_finite
    assert "1 of 16 linear layers" in other_format and "layers.3.mlp.linear_fc2 should have run" in other_format


def test_messages_under_way_keep_their_memory_and_no_others() -> None:
    held, received = run_ranks(
        "tests.distributed.stage_programs:send_many", 2, parallel=STAGES, count=12, in_flight=3
    )
    assert held == [1, 2, *[3] * 10]
    assert received == list(range(12))
