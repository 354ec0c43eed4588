"""torchrun starts a killed job again by itself, and the job goes on from its checkpoints."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.checkpoints import differences
from tests.support.launches import launched
from tests.support.runs import rows_of

RANKS = 2
STEPS = 40
SETTINGS = {"train_iters": STEPS, "save_interval": 1, "keep_last": 3, "resume": True, "use_distributed_optimizer": True}


@pytest.mark.long
def test_a_job_that_loses_each_of_its_ranks_once_finishes_by_itself(workshop) -> None:
    with launched(workshop.rl("whole", **SETTINGS), workshop.run_dir("whole"), RANKS) as launch:
        assert launch.wait() == 0, launch.output[-6000:]
    with launched(workshop.rl("killed", **SETTINGS), workshop.run_dir("killed"), RANKS, restarts=2) as launch:
        for rank, step in ((1, 3), (0, STEPS // 2)):
            launch.wait_for_step(step)
            launch.signal_rank(rank, signal.SIGKILL)
        assert launch.wait() == 0, launch.output[-6000:]
        assert launch.output.count("resumed from") == 2
        assert launch.leftovers() == []
    whole, killed = workshop.run_dir("whole"), workshop.run_dir("killed")
    last = Path("checkpoints") / f"step_{STEPS:07d}"
    assert differences(whole / last, killed / last) == []
    assert rows_of(whole) == rows_of(killed)
