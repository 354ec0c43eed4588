"""Supervised runs on pipeline stages that are killed, that lose a stage, or wait for one for ever."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import differences
from tests.support.kills import KILLED, Kill, Story, tell
from tests.support.launches import launched
from tests.support.runs import rows_of

STAGES = {"num_layers": 4, "use_distributed_optimizer": True, "pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "stages": STAGES,
    "virtual": STAGES | {"num_layers_per_virtual_pipeline_stage": 1},
}
STEPS = 8
KILLS = [
    Kill(1, "stage_forward", 5), Kill(0, "stage_backward", 4), Kill(1, "save_tensors", 1), Kill(0, "save_listed", 1),
    Kill(1, "optimizer_done", 3),
]  # fmt: skip
"""On either stage, amid the passes of a step too: the other waits for what never comes."""


@pytest.mark.parametrize("layout", ["stages", pytest.param("virtual", marks=pytest.mark.long)])
def test_killed_on_any_stage_and_resumed_it_is_the_run_that_was_never_killed(workshop: Any, layout: str) -> None:
    flags = LAYOUTS[layout] | {"train_iters": STEPS, "save_interval": 2, "resume": True}
    flags |= {"hidden_dropout": 0.1, "global_batch_size": 32}
    whole, killed = f"undisturbed_{layout}", f"killed_{layout}"
    stories = [
        Story(name, [str(word) for word in workshop.supervised(name, **flags)], kills)
        for name, kills in ((whole, []), (killed, KILLS))
    ]
    codes = tell(stories, workshop.folder / "logs", ranks=2, timeout=900)
    assert codes[whole] == [[0, 0]] and codes[killed][-1] == [0, 0] and len(codes[killed]) == len(KILLS) + 1
    for kill, ended in zip(KILLS, codes[killed], strict=False):
        assert ended[kill.rank] == KILLED, kill
    last = Path("checkpoints") / f"step_{STEPS:07d}"
    assert differences(workshop.run_dir(whole) / last, workshop.run_dir(killed) / last) == []
    assert rows_of(workshop.run_dir(whole)) == rows_of(workshop.run_dir(killed))


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_dies_ends_the_job_in_seconds_with_one_line(workshop: Any, stage: int) -> None:
    run_dir = workshop.run_dir(f"died_{stage}")
    flags = STAGES | {"train_iters": 4000}
    with launched(workshop.supervised(f"died_{stage}", **flags), run_dir, ranks=2) as launch:
        launch.wait_for_step(3)
        launch.signal_rank(stage, signal.SIGKILL)
        died = time.monotonic()
        assert launch.wait() != 0
        assert time.monotonic() - died < 60
        assert launch.leftovers() == []
        assert sum("another rank has ended" in line for line in launch.output.splitlines()) == 1
        assert "]: Traceback" not in launch.output, "torchrun writes one of its own"


@pytest.mark.long
def test_a_stage_that_is_stopped_for_good_ends_the_job(workshop: Any) -> None:
    """The other says that it waits; torchrun ends the one that is stopped. Where in a step that was depends on the
    moment: `tests/distributed/test_watchdog.py` has the places.
    """
    run_dir = workshop.run_dir("stopped_stage")
    flags = STAGES | {"train_iters": 4000, "distributed_timeout_minutes": 1}
    with launched(workshop.supervised("stopped_stage", **flags), run_dir, ranks=2) as launch:
        launch.wait_for_step(3)
        launch.signal_rank(1, signal.SIGSTOP)
        assert launch.wait() == 1
        assert launch.leftovers() == []
        for seconds in (30, 60):
            assert f"no progress for {seconds} s in " in launch.output
        assert "]: Traceback" not in launch.output
