"""Steps without a signal: when they are told of, and what they are put down to."""

from __future__ import annotations

import pytest

from megatron_rl.run.progress import Progress, likely_reason, note_signal
from tests.support.tiny import tiny_config


def step(groups: int, low: float = 0.0, high: float = 0.0, cut: float = 0.0) -> dict[str, float]:
    return {
        "training/groups_with_signal": float(groups), "critic/rewards/mean": (low + high) / 2,
        "critic/rewards/min": low, "critic/rewards/max": high, "response_length/clip_ratio": cut,
    }  # fmt: skip


def note(progress: Progress, *steps: dict[str, float]) -> None:
    for metrics in steps:
        note_signal(progress, metrics, tiny_config())


def test_three_steps_in_a_row_are_told_of_once(caplog) -> None:
    progress = Progress()
    note(progress, step(0), step(0), step(1), step(0), step(0))
    assert caplog.text == ""
    note(progress, *[step(0)] * 5)
    assert caplog.text.count("no group had reward variance for 3 steps in a row") == 1
    note(progress, step(2), *[step(0)] * 3)
    assert caplog.text.count("no group had reward variance") == 2


def test_a_run_of_two_steps_says_why_it_learnt_nothing(caplog) -> None:
    progress = Progress()
    for _ in range(2):
        assert caplog.text == ""
        note_signal(progress, step(0, 1.0, 1.0), tiny_config(train_iters=2))
    assert "for 2 steps in a row" in caplog.text and "the tasks are too easy" in caplog.text


def test_supervised_steps_have_no_groups(caplog) -> None:
    note(Progress(), *[{"train/loss": 1.0}] * 4)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        (step(0, 0.0, 0.0), "every reward was 0: the tasks are too hard"),
        (step(0, -1.0, -1.0, cut=0.25), "every reward was -1: the tasks are too hard"),
        (step(0, -1.0, -1.0, cut=0.75), "every reward was -1, and 75% of the answers were cut before they ended"),
        (step(0, 1.0, 1.0, cut=0.75), "every reward was 1: the tasks are too easy"),
        (step(0, 0.0, 1.0), "rewards were 0 to 1, but equal within each group"),
        ({"training/groups_with_signal": 0.0, "training/failed_grades": 8.0}, "all 8 grades failed"),
    ],
)
def test_the_numbers_decide_what_is_likely(metrics: dict[str, float], told: str) -> None:
    assert likely_reason(metrics, tiny_config()).startswith(told)
