"""The evaluation before the first step is made once, whenever the run is stopped after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.metrics.jsonl import JsonlWriter, read_rows
from megatron_rl.metrics.timers import PhaseTimer
from megatron_rl.run import training
from megatron_rl.run.progress import Progress

EARLIER = {"step": 0, "updates": 0, "policy_version": 0}
"""What a checkpoint of an earlier version says."""


class Stopped:
    """A run that goes on from ``state`` and is asked to stop before its first step."""

    evaluator = object()
    policy = None
    stop = SimpleNamespace(requested=True, reason="SIGTERM")
    config = SimpleNamespace(total_steps=4)

    def __init__(self, metrics: Path, state: dict[str, Any] | None, results: Iterator[dict[str, float] | None]) -> None:
        self._results = results
        self.progress, self.timer = Progress(), PhaseTimer()
        if state is not None:
            self.progress.load_state_dict(state)
        self._rows = JsonlWriter(metrics, resume_step=self.progress.newest_row)
        self.reporter = SimpleNamespace(step=lambda step, row, _: self._rows.write(step, row))
        self.saved: dict[str, Any] | None = None

    def evaluate(self, _: object) -> dict[str, float] | None:
        return next(self._results)

    def save(self, final: bool) -> None:
        self.saved = self.progress.state_dict()
        self._rows.close()


@pytest.mark.parametrize(("cut_short", "evaluations"), [(False, 1), (True, 2)])
def test_a_stop_before_step_1(
    one_rank: object, tmp_path: Path, cut_short: bool, evaluations: int
) -> None:
    """Made again it would be dealt to the ranks by the lengths of the first: other tasks in eval_000000.jsonl."""
    made: list[dict[str, float] | None] = []

    def results() -> Iterator[dict[str, float] | None]:
        while True:
            made.append(None if cut_short and not made else {"val/a/pass@1": float(len(made))})
            yield made[-1]

    state, evaluated = None, results()
    for _ in range(3):
        run = Stopped(tmp_path / "metrics.jsonl", state, evaluated)
        assert training.train(run, lambda *_: None) == "stopped"
        state = run.saved
    assert len(made) == evaluations
    [row] = read_rows(tmp_path / "metrics.jsonl")
    assert (row["step"], row["val/a/pass@1"]) == (0, float(cut_short))


def test_a_checkpoint_of_an_earlier_version_evaluates_again() -> None:
    progress = Progress()
    progress.load_state_dict(EARLIER)
    assert (progress.evaluated_first, progress.newest_row) == (False, -1)
