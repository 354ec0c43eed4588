"""Ranks of different stages wait for each other: each says where, within the limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks


@pytest.mark.parametrize(
    ("hung", "other_waits_in"), [(0, "send_backward_recv_forward"), (1, "send_forward_recv_backward")]
)
def test_a_stage_that_hangs_and_the_one_that_waits_for_it_are_both_told(
    tmp_path: Path, hung: int, other_waits_in: str
) -> None:
    told = run_ranks("tests.distributed.watchdog_programs:hang", 2, folder=str(tmp_path), hung=hung)
    place = "run_schedule (trainer/update.py:"
    for text in told:
        assert text.startswith("no progress for 2 s in ") and place in text and "step (trainer/supervised.py:" in text
    assert told[hung].startswith("no progress for 2 s in wait < wait < step (trainer/update.py:")
    assert told[1 - hung].partition(place)[0] == f"no progress for 2 s in _communicate < {other_waits_in} < "


@pytest.mark.parametrize("stages", [1, 2])
def test_no_collective_gives_up_before_the_watchdog_has_said_where_it_waits(stages: int) -> None:
    """At the same moment, a traceback came in place of the line."""
    for minutes in run_ranks("tests.distributed.watchdog_programs:timeouts", 2, stages=stages):
        assert set(minutes.values()) == {11.0}, minutes
