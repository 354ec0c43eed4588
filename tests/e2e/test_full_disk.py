"""A run whose checkpoints stop fitting: it goes on while it can, says so, and loses nothing that was saved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.checkpoints import differences
from tests.support.runs import Outcome, facts_of, rows_of, run_many

RANKS = 2
FAILED_SAVES = "checkpoint/failed_saves"
LAST = Path("checkpoints") / "step_0000004"


def _without_count(run_dir: Path) -> list[dict[str, object]]:
    return [{name: value for name, value in row.items() if name != FAILED_SAVES} for row in rows_of(run_dir)]


@pytest.fixture(scope="module")
def outcomes(workshop) -> dict[str, Outcome]:
    """Two steps, two more without room for their checkpoints, and the same again with room."""
    settings = {"save_interval": 1, "resume": True}
    whole, first = run_many(
        [workshop.rl("whole", **settings), workshop.rl("full", **settings, exit_interval=2)], RANKS
    )
    largest = max(path.stat().st_size for path in (first_checkpoint(workshop)).iterdir())
    (full,) = run_many([workshop.rl("full", **settings)], RANKS, largest_file=largest - 1)
    found = {
        "names": sorted(path.name for path in (workshop.run_dir("full") / "checkpoints").iterdir()),
        "facts": facts_of(workshop.run_dir("full")),
        "rows": rows_of(workshop.run_dir("full")),
    }
    (again,) = run_many([workshop.rl("full", **settings)], RANKS)
    return {"whole": whole.check(), "first": first.check(), "full": full, "again": again, **found}


def first_checkpoint(workshop) -> Path:
    """What was saved while there was room."""
    return workshop.run_dir("full") / "checkpoints" / "step_0000002"


def test_a_periodic_save_that_fails_is_told_and_counted_and_the_run_goes_on(outcomes) -> None:
    output = outcomes["full"].output
    assert "NOT SAVED: the checkpoint '" in output
    assert re.search(r"step_0000003\.\w+\.tmp' could not be written", output)
    assert [row[FAILED_SAVES] for row in outcomes["rows"]] == [0, 0, 0, 1]


def test_the_last_save_that_fails_ends_the_run_with_an_error(outcomes) -> None:
    output = outcomes["full"].check(1).output
    assert re.search(r"step_0000004\.\w+\.tmp' could not be written", output)
    assert "free space there, or give --save a directory on another disk" in output
    assert "Traceback" not in output
    assert outcomes["facts"]["status"] == "failed"
    assert "could not be written" in outcomes["facts"]["error"]


def test_what_was_saved_before_is_untouched_and_nothing_half_written_stays(outcomes) -> None:
    assert outcomes["names"] == [".lock", "latest", "step_0000001", "step_0000002"]


def test_with_room_again_the_same_command_ends_as_if_nothing_had_happened(outcomes, workshop) -> None:
    output = outcomes["again"].check().output
    assert "(step 2)" in output
    assert "groups were answered before" in output
    whole, full = workshop.run_dir("whole"), workshop.run_dir("full")
    assert differences(whole / LAST, full / LAST) == []
    assert _without_count(full) == _without_count(whole)
