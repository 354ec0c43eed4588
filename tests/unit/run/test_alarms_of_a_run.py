"""Which runs watch for signs that they go wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.metrics.jsonl import read_rows
from megatron_rl.metrics.rundir import RunDirectory
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.run.progress import Progress
from megatron_rl.run.reporting import Reporter
from tests.support.tiny import tiny_config

NOTHING_RIGHT = {"val/toy/pass@1": 0.0, "val/toy/reward": 0.0, "val/toy/num_tasks": 64.0}


@pytest.mark.parametrize(("training", "lines"), [({}, 1), ({"perform_rl_step": False}, 0)], ids=["RL", "SFT"])
def test_supervised_training_may_begin_without_a_right_answer(
    tmp_path: Path, one_rank: ParallelGroups, caplog: pytest.LogCaptureFixture, training, lines
) -> None:
    reporter = Reporter(tiny_config(run_dir=tmp_path, **training), one_rank, RunDirectory(tmp_path), None, None, ())
    reporter.open(Progress())
    reporter.log.write(0, NOTHING_RIGHT)
    reporter.close()
    assert caplog.text.count("no reward: no held-out answer of toy is right") == lines
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 1
