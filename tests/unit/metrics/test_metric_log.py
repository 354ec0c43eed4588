"""A display may fail in any way; the record may not."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import pytest

from megatron_rl.errors import TrainingError
from megatron_rl.metrics.rollouts import TextSample
from megatron_rl.metrics.writers import MetricLog


class Recorder:
    """Keeps what it is given; raises ``failure`` at ``fail_at``."""

    def __init__(self, failure: Exception | None = None, fail_at: int = 1) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.samples: list[tuple[int, Sequence[TextSample]]] = []
        self.closed = False
        self._failure, self._fail_at = failure, fail_at

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._failure is not None and step >= self._fail_at:
            raise self._failure
        self.rows.append((step, dict(metrics)))

    def write_samples(self, step: int, samples: Sequence[TextSample]) -> None:
        if self._failure is not None:
            raise self._failure
        self.samples.append((step, samples))

    def close(self) -> None:
        self.closed = True
        if self._failure is not None:
            raise self._failure


def test_every_writer_gets_every_step() -> None:
    record, display = Recorder(), Recorder()
    log = MetricLog(record, [display])
    log.write(1, {"a": 1.0})
    log.write(2, {"a": 2.0})
    log.close()
    assert record.rows == display.rows == [(1, {"a": 1.0}), (2, {"a": 2.0})]
    assert record.closed and display.closed


def test_failing_display_is_dropped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    broken, healthy = Recorder(RuntimeError("no route to host"), fail_at=2), Recorder()
    log = MetricLog(Recorder(), [broken, healthy])
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            log.write(step, {})
    assert [step for step, _ in broken.rows] == [1]
    assert [step for step, _ in healthy.rows] == [1, 2, 3]
    assert [record.getMessage() for record in caplog.records] == [
        "Recorder is off from step 2 on: RuntimeError: no route to host"
    ]


def test_samples_go_to_the_displays_and_a_failing_one_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    record, display, broken = Recorder(), Recorder(), Recorder(RuntimeError("no"), fail_at=100)
    log = MetricLog(record, [broken, display])
    log.write_samples(3, [])
    log.write(4, {})
    assert (display.samples, record.samples) == ([(3, [])], [])
    assert broken.rows == []
    assert "Recorder is off from step 3 on: RuntimeError: no" in caplog.text


def test_lost_record_is_an_error() -> None:
    log = MetricLog(Recorder(OSError(28, "No space left on device")))
    with pytest.raises(TrainingError, match="No space left on device"):
        log.write(1, {})


def test_display_that_fails_to_close_does_not_hide_the_others(caplog: pytest.LogCaptureFixture) -> None:
    broken, healthy = Recorder(RuntimeError("gone"), fail_at=99), Recorder()
    with caplog.at_level(logging.WARNING):
        MetricLog(None, [broken, healthy]).close()
    assert healthy.closed
    assert len(caplog.records) == 1


def test_log_without_writers_takes_the_calls() -> None:
    log = MetricLog()
    log.write(1, {"a": 1.0})
    log.close()
