"""Saving between an update and the next forward pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.test_parity import OVERLAP, SUPERVISED
from tests.support.ranks import run_ranks


@pytest.mark.parametrize("changes", [SUPERVISED, SUPERVISED | OVERLAP], ids=["plain", "overlap"])
def test_a_checkpoint_holds_the_weights_of_the_last_update(tmp_path: Path, changes: dict[str, object]) -> None:
    program = "tests.distributed.step_programs:save_while_gathering"
    for distances in run_ranks(program, 2, timeout=600, folder=str(tmp_path), changes=changes):
        assert max(distances) == 0.0
