"""Harnesses in worker processes: whatever a sample does, it costs no other one its reward and leaves nothing behind."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.environments.scripted import always, scripted_model
from megatron_rl.environments.workers import WorkerPool
from megatron_rl.types import Grade, HarnessRun, Task

TALK, AWAITS = "harnesses:Talk", "harnesses:Awaits"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the pool's directories are made."""
    folder = tmp_path_factory.mktemp("scratch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        yield folder


@pytest.fixture(scope="module")
def pool(hostile_path: None, scratch: Path) -> Iterator[WorkerPool]:
    with contextlib.closing(WorkerPool.for_harnesses(8, [(TALK, {}), (AWAITS, {})])) as pool:
        yield pool


@pytest.fixture(scope="module")
def model() -> Iterator[str]:
    """A model that says 1."""
    with scripted_model(always("1")) as url:
        yield url


def sample(url: str, fault: str = "", mark: Path | str = "", number: int = 0) -> HarnessRun:
    return HarnessRun(Task("0", "?", {"fault": fault, "mark": str(mark)}), number, url, f"key-{number}-of-a-session")


def run(pool: WorkerPool, *runs: HarnessRun, reference: str = TALK, deadline_s: float = 60.0, **options) -> list[Grade]:
    return pool.run(reference, options, runs, deadline_s, lambda: False)


def test_a_harness_is_paid_for_what_the_model_says(pool, model):
    results = run(pool, *(sample(model, number=number) for number in range(20)), bonus=0.5)
    assert [result.reward for result in results] == [1.5] * 20


def test_an_asynchronous_harness_gets_an_asynchronous_client(pool, model):
    assert run(pool, sample(model), reference=AWAITS)[0].reward == 2.0
