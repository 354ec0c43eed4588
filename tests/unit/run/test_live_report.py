"""The report on the way: when it is written, by whom, and what a failure costs."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from megatron_rl.metrics.jsonl import JsonlWriter
from megatron_rl.metrics.rundir import RunDirectory
from megatron_rl.run import reporting
from megatron_rl.run.reporting import REPORT_INTERVAL_S, LiveReport, start_report


class Process:
    """Stands in for one that writes; ``status`` is None while it does."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.killed = False

    def poll(self) -> int | None:
        return self.status


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    processes: list[Process] = []

    def start(_: Path) -> Process:
        processes.append(Process())
        return processes[-1]

    monkeypatch.setattr(reporting, "start_report", start)
    return processes


def test_once_a_minute_and_at_the_first_evaluation(started: list[Process]) -> None:
    now = [0.0]
    report = LiveReport(Path(), lambda: now[0])
    counts = []
    for seconds, evaluated in ((1, False), (2, True), (3, True), (61, False), (62, True), (130, False)):
        now[0] = seconds
        report.offer(evaluated)
        counts.append(len(started))
        if started:
            started[-1].status = 0
    assert counts == [0, 1, 1, 1, 2, 3]  # 61 is 59 s after the first


def test_one_process_at_a_time(started: list[Process]) -> None:
    now = [0.0]
    report = LiveReport(Path(), lambda: now[0])
    for _ in range(3):
        now[0] += REPORT_INTERVAL_S
        report.offer(False)
    assert len(started) == 1
    started[0].status = 0
    report.offer(False)
    assert len(started) == 2


def test_a_failure_is_one_warning_and_the_last(started: list[Process], caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    report = LiveReport(Path("runs/x"), lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            now[0] += REPORT_INTERVAL_S
            report.offer(False)
            started[-1].status = 1
    assert len(started) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "report.html is not refreshed any more (exit status 1); python -m megatron_rl.metrics.report runs/x says why"
    ]


def test_the_process_writes_the_report_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From another directory, behind the run's own processes, and whole: nothing else is left."""
    run = RunDirectory(tmp_path / "run")
    run.create({}, {}, ["train"])
    JsonlWriter(run.metrics).write(3, {"critic/rewards/mean": 0.5})
    monkeypatch.chdir(tmp_path)
    process = start_report(Path("run"))
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == reporting.NICENESS
    assert process.wait(60) == 0
    assert "step 3" in run.report.read_text(encoding="utf-8")
    assert [path.name for path in run.path.iterdir() if path.name.startswith(".")] == []


def test_the_end_of_a_run_waits_for_the_process(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create({}, {}, ["train"])
    report = LiveReport(tmp_path)
    report.offer(evaluated=True)
    report.close()
    assert run.report.exists()
    report.close()
