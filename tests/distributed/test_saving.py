"""Saving between an update and the next forward pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.test_parity import OVERLAP, SUPERVISED
from tests.support.ranks import run_ranks
from tests.support.saves import COMMON


@pytest.mark.parametrize("changes", [SUPERVISED, SUPERVISED | OVERLAP], ids=["plain", "overlap"])
def test_a_checkpoint_holds_the_weights_of_the_last_update(tmp_path: Path, changes: dict[str, object]) -> None:
    program = "tests.distributed.step_programs:save_while_gathering"
    for distances in run_ranks(program, 2, timeout=600, folder=str(tmp_path), changes=changes):
        assert max(distances) == 0.0


FILES = (*COMMON, "__0_0.distcp", "__1_0.distcp", ".metadata", "metadata.json", "run_state.json", "manifest.json")
"""Rank 1 writes one of them, rank 0 the others: each fails on one rank alone."""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_save_that_fails_on_one_rank_fails_on_all_and_nobody_waits(tmp_path: Path) -> None:
    program = "tests.distributed.save_programs:fail_on_one_rank"
    first, second = run_ranks(program, 2, folder=str(tmp_path), files=FILES, changes=SUPERVISED)
    assert first == second
    assert first["failed_saves"] == len(FILES)
    for step, file in enumerate(FILES, start=1):
        message, before, after = first[file]
        assert f"step_{step + 1:07d}." in message and "No space left on device" in message, file
        assert (before, after) == (f"step_{step:07d}", f"step_{step + 1:07d}")


def test_all_ranks_agree_which_evaluation_is_the_best() -> None:
    """Only the leader of a model copy has verdicts; a save that one rank begins alone would wait for ever."""
    decisions = run_ranks("tests.distributed.step_programs:keep_the_best", 2)
    assert decisions == [[True, False, True]] * 2
