"""A disk that is full while a run goes on: what is for people only is a warning, the rest is one line."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest

from megatron_rl.metrics.rundir import RunDirectory
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.run.reporting import Reporter
from megatron_rl.types import Grade
from tests.support.forks import run_python
from tests.support.runs import records_of
from tests.support.tiny import tiny_config
from tests.unit.metrics.test_rollout_records import make_group
from tests.unit.rollout.test_journal import largest_file

GRADE = Grade(1.0)
ENDS = """
import sys
from megatron_rl import main
def full(*_):
    raise OSError({number}, "that", "summary.json")
main._run = full
sys.exit(main.main(["train_rl.py"]))
"""


def test_records_that_do_not_fit_are_told_once_and_written_when_they_fit(
    tmp_path: Path, one_rank: ParallelGroups, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("megatron_rl"), "propagate", True)
    directory = RunDirectory(tmp_path)
    reporter = Reporter(tiny_config(run_dir=tmp_path), one_rank, directory, None, None, ())
    groups = [make_group("a", *[GRADE] * 2), make_group("a", GRADE)]
    directory.rollouts.mkdir()
    directory.logs.mkdir()
    directory.rollouts_path(1).write_text("of an earlier start\n")
    with largest_file(10):
        for step in (1, 2):
            reporter.records(step, groups, str, (0, 1), [])
            reporter.evaluation_records(step, groups, str)
            reporter.dump_batches(step, [])
    assert caplog.text.count("cannot be written (File too large): the run goes on without its records") == 1
    assert list(directory.rollouts.iterdir()) == []
    reporter.records(3, groups, str, (0, 1), [])
    assert len(records_of(directory.rollouts_path(3))) == 3


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_what_a_run_cannot_do_without_ends_it_in_one_line(number: int) -> None:
    ended = run_python("-c", ENDS.format(number=number))
    assert ended.returncode == 1
    assert "'summary.json'; free space there, then --resume goes on" in ended.stderr
    assert "Traceback" not in ended.stderr
