"""The table of docs/measurements/memory.md: bytes of the ranks of a layout, measured and estimated."""

from __future__ import annotations

import pytest
import torch

from tests.support.ranks import run_ranks
from tools.benchmark.memory import LAYOUTS, LargestHeld, problems_of


def test_every_layout_can_run() -> None:
    assert {name: problems_of(name) for name in LAYOUTS} == dict.fromkeys(LAYOUTS, [])


def test_what_is_held_at_once_by_hand() -> None:
    """1,024 numbers are 4 KiB; a view and an operation in place take nothing, and nothing that was there before."""
    before = torch.ones(1024)
    with LargestHeld() as made:
        first = before * 2
        second = first.view(32, 32).add_(1) + before.view(32, 32)
        assert made.most == 2 * 4096
        del first
        third = second[:, :8] + 1
    assert made.most == 2 * 4096 and third.nbytes == 1024
    del second


@pytest.mark.parametrize(
    ("layout", "tolerance"),
    [
        ("one rank", 0.1),
        pytest.param("TP2", 0.1, marks=pytest.mark.long),
        pytest.param("PP2", 0.2, marks=pytest.mark.long),
        pytest.param("experts EP2", 0.2, marks=pytest.mark.long),  # which are not equally busy
        pytest.param("CP2", 0.5, marks=pytest.mark.long),  # whose attention keeps more on a CPU
    ],
)
def test_the_estimate_is_near_what_ranks_allocate(layout: str, tolerance: float) -> None:
    for row in run_ranks("tools.benchmark.memory:row_of_rank", LAYOUTS[layout][0], name=layout):
        own, theirs = row["measured"], row["estimated"]
        for use in ("weights", "gradients", "optimizer"):
            assert own[use] == pytest.approx(theirs[use], rel=0.01), (row["rank"], use)
        assert own["peak"] == pytest.approx(theirs["peak"], rel=tolerance), row["rank"]
