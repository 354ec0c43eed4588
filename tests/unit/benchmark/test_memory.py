"""The table of docs/measurements/memory.md: bytes of the ranks of a layout, measured and estimated."""

from __future__ import annotations

import pytest

from tools.benchmark.memory import LAYOUTS, measured_layout, problems_of


def test_every_layout_can_run() -> None:
    assert {name: problems_of(name) for name in LAYOUTS} == dict.fromkeys(LAYOUTS, [])


@pytest.mark.long
@pytest.mark.parametrize(("layout", "tolerance"), [("TP2", 0.1), ("PP2", 0.1), ("experts EP2", 0.2), ("CP2", 0.3)])
def test_the_estimate_is_near_what_ranks_allocate(layout: str, tolerance: float) -> None:
    for row in measured_layout(layout):
        own, theirs = row["measured"], row["estimated"]
        for use in ("weights", "gradients", "optimizer"):
            assert own[use] == pytest.approx(theirs[use], rel=0.01), (row["rank"], use)
        assert own["peak"] == pytest.approx(theirs["peak"], rel=tolerance), row["rank"]
