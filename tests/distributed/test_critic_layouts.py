"""The critic on one rank and on every parallel layout: values, gradients, weights after three updates, metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_layouts import (
    CONTEXT,
    EXPERTS,
    FEW,
    OVERLAP,
    SHARED,
    STAGES,
    TENSOR,
    TIED,
    VIRTUAL,
    Found,
    assert_equal,
    of_all_ranks,
)
from tests.support.ranks import run_ranks

GAE = {
    "rl_advantage": "gae", "rl_advantage_args": ("gae_lambda=0.9",), "rl_critic_lr": 2e-3, "rl_critic_clip_range": 0.05,
}  # fmt: skip
ADAPTERS = {"lora_rank": 4, "rl_critic_lora_rank": 2}
CASES: dict[str, dict[str, Any]] = {
    "plain": GAE,
    "tied": GAE | TIED,
    "experts": GAE | EXPERTS | {"rl_router_replay": True},
    "balanced": GAE | EXPERTS | {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1},
    "overlaps, few": GAE | OVERLAP | FEW,
    "on the policy's base": GAE | ADAPTERS | TIED,
}
LONG_CASES = {"on the policy's base": CASES["on the policy's base"], "and experts": GAE | ADAPTERS | EXPERTS | OVERLAP}
LAYOUTS: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "TP2, sequence-parallel": (2, TENSOR, ["plain", "experts", "on the policy's base"]),
    "PP2": (2, STAGES, ["plain", "tied", "on the policy's base"]),
    "PP2 x VPP2": (2, VIRTUAL, ["plain"]),
    "CP2": (2, CONTEXT, ["plain"]),
    "EP2": (2, SHARED, ["experts", "balanced"]),
    "DP2": (2, {}, ["plain", "overlaps, few"]),
    "CP2 x TP2, sequence-parallel": (4, CONTEXT | TENSOR, ["plain"]),
    "PP2 x DP2": (4, STAGES, ["overlaps, few"]),
    "PP2 x VPP2, long": (2, VIRTUAL, ["on the policy's base"]),
    "CP2, long": (2, CONTEXT, ["on the policy's base"]),
    "TP2, sequence-parallel, long": (2, TENSOR, ["and experts"]),
    "EP2, long": (2, SHARED, ["and experts"]),
}
"""Ranks, sizes, cases; of `LONG_CASES` where the name says so."""


class Results:
    """Runs a layout when a test first asks for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metrics: dict[str, list[dict[str, Any]]] = {}

    def of(self, layout: str, case: str) -> Found:
        """A layout, or ``one rank``."""
        known = LONG_CASES if layout.endswith("long") else CASES
        world_size, parallel, names = LAYOUTS.get(layout, (1, {}, [*known]))
        folder = self._folder / layout
        if layout not in self._metrics:
            folder.mkdir()
            self._metrics[layout] = run_ranks(
                "tests.distributed.layout_programs:train", world_size, timeout=600,
                folder=str(folder), parallel=parallel, cases={name: known[name] for name in names},
            )  # fmt: skip
        return [metrics[case] for metrics in self._metrics[layout]], of_all_ranks(folder, case, world_size)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("critics"))


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        pytest.param(layout, case, marks=[pytest.mark.long] if ranks > 2 or layout.endswith("long") else [])
        for layout, (ranks, _, cases) in LAYOUTS.items()
        for case in cases
    ],
)
def test_as_on_one_rank(results: Results, layout: str, case: str) -> None:
    found = results.of(layout, case)
    assert_equal(found, results.of("one rank, long" if layout.endswith("long") else "one rank", case))
    assert found[1].keys() >= {"values", "critic's weights"}
    assert all(step["critic/vf_clipfrac"] < 1 for step in found[0][0])
