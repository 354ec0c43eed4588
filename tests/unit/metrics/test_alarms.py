"""Signs that a run is going wrong, on curves made by hand and on recorded ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.metrics.alarms import WINDOW, AlarmWriter, find_alarms

CURVES = sorted((Path(__file__).parent / "curves").glob("*.jsonl"))
USUAL = {
    "critic/rewards/mean": 0.4, "critic/rewards/max": 1.0, "response_length/clip_ratio": 0.05,
    "response_length/mean": 100.0, "actor/entropy": 0.8, "training/signal_share": 0.6,
    "training/rollout_logprob_gap_mean": 1e-6, "response_length/repeated_share": 0.02,
}  # fmt: skip
SHORT = dict(zip(("reward", "highest", "cut", "length", "entropy", "signal", "gap", "repeated"), USUAL, strict=True))


def curve(**changed: float) -> list[dict[str, Any]]:
    """8 usual steps, then 8 with other values of the metrics called ``reward``, ``length``, ``cut``, ..."""
    later = USUAL | {SHORT[name]: value for name, value in changed.items()}
    return [{"step": step + 1, **(USUAL if step < WINDOW else later)} for step in range(2 * WINDOW)]


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"reward": 0.1}, "reward collapse"),
        ({"entropy": 0.05, "signal": 0.1}, "entropy collapse"),
        ({"signal": 0.0}, "no reward variance"),
        ({"cut": 0.6}, "length explosion"),
        ({"length": 5.0}, "length collapse"),
        ({"gap": 0.3}, "mismatch growth"),
        ({"repeated": 0.5}, "repetition"),
    ],
)
def test_each_kind_is_found_once(changed, kind) -> None:
    rows = curve(**changed)
    (found,) = find_alarms([*rows, {**rows[-1], "step": 17}])
    assert found.kind == kind
    assert WINDOW < found.step <= 2 * WINDOW


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"entropy": 0.05},  # while groups still differ
        {"cut": 0.3},
        {"gap": 0.05},
        {"repeated": 0.2},
    ],
)
def test_smaller_changes_are_no_alarm(changed) -> None:
    assert not find_alarms(curve(**changed))


def test_a_solved_task_is_no_collapse() -> None:
    assert not find_alarms(curve(entropy=0.01, signal=0.01, reward=0.97))


def test_held_out_falls_while_the_training_reward_rises() -> None:
    rows = [{"step": 0, "val/sums/pass@1": 0.3, "val/sums/pass@1_ci95": 0.02}]
    for step, (held_out, reward) in enumerate([(0.5, 0.4), (0.49, 0.6), (0.42, 0.7), (0.41, 0.8)], 1):
        rows.append({**USUAL, "step": step, "critic/rewards/mean": reward, "val/sums/pass@1": held_out,
                     "val/sums/pass@1_ci95": 0.02})  # fmt: skip
    (found,) = find_alarms(rows)
    assert (found.kind, found.step) == ("held-out falls", 3)  # 0.49 is within the interval of 0.5
    assert "fell from 0.500 (step 1) to 0.420" in found.text
    assert not find_alarms([{**row, "critic/rewards/mean": 0.4} for row in rows[1:]])


def test_no_right_answer_before_training() -> None:
    first = {"step": 0, "val/gsm8k/pass@1": 0.0, "val/gsm8k/greedy": 0.0, "val/gsm8k/reward": 0.0}
    assert [alarm.kind for alarm in find_alarms([first])] == ["no reward"]
    assert not find_alarms([{**first, "val/gsm8k/reward": 0.1}])
    assert not find_alarms([{**USUAL, "step": 1}, {**first, "step": 1}])  # after training has begun


def test_a_resumed_run_does_not_repeat_its_alarms(caplog) -> None:
    rows = curve(repeated=0.5)
    (found,) = find_alarms(rows)
    AlarmWriter(rows[: found.step]).write(17, rows[-1])
    assert not caplog.records
    AlarmWriter(rows[: found.step - 1]).write(found.step, rows[found.step - 1])
    assert caplog.messages == [f"step {found.step}: repetition: {found.text}"]


def test_missing_and_unfinite_numbers_give_no_alarm() -> None:
    assert not find_alarms([{"step": step, "train/loss": 1.0} for step in range(20)])
    assert not find_alarms([{"step": row["step"], **dict.fromkeys(USUAL)} for row in curve()])


@pytest.mark.parametrize("path", CURVES, ids=lambda path: path.stem)
def test_recorded_runs(path: Path) -> None:
    """A curve's name begins with good, or with the alarm that the run should give: ``reward_collapse-lr_x30``."""
    kinds = [alarm.kind.replace("-", " ").replace(" ", "_") for alarm in find_alarms(map(json.loads, path.read_text().splitlines()))]
    wanted = path.stem.partition("-")[0]
    assert kinds == [] if wanted == "good" else wanted in kinds
