"""What a save's writer has written comes back without another process in between."""

from __future__ import annotations

import multiprocessing
import queue
import resource
from pathlib import Path

import psutil
import pytest
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megatron_rl.checkpoint.saving import ResultQueue
from tests.support.saves import saving_run, train_a_step
from tests.support.tiny import tiny_config
from tests.unit.checkpoint.test_damage import SUPERVISED

LARGE = {0: ["x" * 100_000]}
"""More than a pipe holds."""


def test_what_a_fork_puts_is_taken_once() -> None:
    results = ResultQueue()
    writer = multiprocessing.get_context("fork").Process(target=results.put, args=(LARGE,))
    writer.start()
    writer.join(20)
    assert writer.exitcode == 0
    assert results.get_nowait() == LARGE
    with pytest.raises(queue.Empty):
        results.get_nowait()


def test_what_nobody_took_is_replaced_though_it_is_longer() -> None:
    results = ResultQueue()
    results.put(LARGE)
    results.put({0: []})
    assert results.get_nowait() == {0: []}
    with pytest.raises(queue.Empty):
        results.get_nowait()


def test_what_was_put_in_part_is_not_taken() -> None:
    results = ResultQueue()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="large"):
            results.put(LARGE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(queue.Empty):
        results.get_nowait()


def test_a_save_leaves_no_process(one_rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    run = saving_run(tiny_config(**SUPERVISED), one_rank, tmp_path)
    train_a_step(run)
    before = psutil.Process().children(recursive=True)
    run.save(final=True)
    assert psutil.Process().children(recursive=True) == before
    run.closing.close()
