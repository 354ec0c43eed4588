"""Seconds by phase, read from an injected clock."""

from __future__ import annotations

import pytest

from megatron_rl.metrics.timers import PhaseTimer


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_phases_nest_and_repeat(clock: Clock) -> None:
    timer = PhaseTimer(clock=clock)
    with timer.phase("step"):
        for seconds in (1.0, 2.0):
            with timer.phase("gen"):
                clock.now += seconds
        clock.now += 4.0
    assert timer.collect() == {"timing_s/gen": 3.0, "timing_s/step": 7.0}


def test_collect_starts_the_next_step(clock: Clock) -> None:
    timer = PhaseTimer(clock=clock)
    with timer.phase("gen"):
        clock.now += 1.0
    timer.collect()
    assert timer.collect() == {}


def test_a_phase_open_twice_at_once_counts_wall_seconds_once(clock: Clock) -> None:
    timer = PhaseTimer(clock=clock)
    first, second = timer.phase("reward"), timer.phase("reward")
    first.__enter__()
    clock.now = 1.0
    second.__enter__()
    clock.now = 3.0
    first.__exit__(None, None, None)
    clock.now = 4.0
    second.__exit__(None, None, None)
    assert timer.collect() == {"timing_s/reward": 4.0}


def test_failed_phase_is_timed_and_the_error_passes(clock: Clock) -> None:
    timer = PhaseTimer(clock=clock)
    with pytest.raises(KeyError), timer.phase("gen"):
        clock.now += 2.0
        raise KeyError
    assert timer.collect() == {"timing_s/gen": 2.0}


def test_sync_runs_before_every_reading(clock: Clock) -> None:
    def finish_kernels() -> None:
        clock.now += 10.0

    timer = PhaseTimer(clock=clock, sync=finish_kernels)
    with timer.phase("gen"):
        clock.now += 1.0
    assert timer.collect() == {"timing_s/gen": 11.0}
