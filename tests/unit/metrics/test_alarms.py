"""Signs that a run is going wrong, on curves made by hand and on recorded ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.metrics import report
from megatron_rl.metrics.alarms import FEWEST_TASKS, WINDOW, AlarmWriter, Watch, find_alarms
from megatron_rl.metrics.report import build_payload
from megatron_rl.metrics.rundir import RunDirectory

CURVES = sorted((Path(__file__).parent / "curves").glob("*.jsonl"))
USUAL = {
    "critic/rewards/mean": 0.4, "critic/rewards/max": 1.0, "critic/rewards/min": 0.0,
    "response_length/clip_ratio": 0.05, "response_length/mean": 100.0, "actor/entropy": 0.8,
    "training/signal_share": 0.6, "training/rollout_logprob_gap_mean": 1e-6, "response_length/repeated_share": 0.02,
}  # fmt: skip
NAMES = ("reward", "high", "low", "cut", "length", "entropy", "signal", "gap", "repeated")
SHORT = dict(zip(NAMES, USUAL, strict=True))
REWARDS = [name for name in USUAL if name.startswith("critic/rewards")]
SHARES = "training/counting_share", "rollout/score/mean"
FIRST = {"step": 0, "val/gsm8k/num_tasks": 64, "val/gsm8k/pass@1": 0.0, "val/gsm8k/greedy": 0.0, "val/gsm8k/reward": 0}


def curve(**changed: float) -> list[dict[str, Any]]:
    """8 usual steps, then 8 with other values of the metrics called ``reward``, ``length``, ``cut``, ..."""
    later = USUAL | {SHORT.get(name, name): value for name, value in changed.items()}
    return [{"step": step + 1, **(USUAL if step < WINDOW else later)} for step in range(2 * WINDOW)]


def kinds(rows: list[dict[str, Any]]) -> list[str]:
    return [alarm.kind for alarm in find_alarms(rows)]


def rescaled(rows: list[dict[str, Any]], scale: float, shift: float) -> list[dict[str, Any]]:
    """Other rewards for the same answers."""
    return [{**row, **{name: scale * row[name] + shift for name in REWARDS if name in row}} for row in rows]


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"reward": 0.1}, "reward collapse"),
        ({"reward": 0.0, "signal": 0.0}, "reward collapse"),
        ({"entropy": 0.05, "signal": 0.1}, "entropy collapse"),
        ({"signal": 0.0}, "no reward variance"),
        ({"cut": 0.6}, "length explosion"),
        ({"length": 5.0}, "length collapse"),
        ({"gap": 0.3}, "mismatch growth"),
        ({"repeated": 0.5}, "repetition"),
        ({}, None),
        ({"reward": 0.25}, None),
        ({"entropy": 0.05}, None),  # while groups still differ
        ({"entropy": 0.01, "signal": 0.01, "length": 15, "reward": 0.97}, None),  # solved
        ({"length": 15, "reward": 0.5}, None),
        ({"cut": 0.3}, None),
        ({"gap": 0.05}, None),
        ({"repeated": 0.2}, None),
    ],
)
@pytest.mark.parametrize("rewards", [(1, 0), (2, -1), (0.1, -50)], ids=["0 to 1", "-1 to 1", "-50 to -49.9"])
def test_each_kind_is_found_once_whatever_the_range_of_rewards(changed, kind, rewards) -> None:
    rows = rescaled(curve(**changed), *rewards)
    found = find_alarms([*rows, {**rows[-1], "step": 17}])
    assert [alarm.kind for alarm in found] == ([] if kind is None else [kind])
    assert all(WINDOW < alarm.step <= 2 * WINDOW and "\n" not in alarm.text for alarm in found)


def test_steps_that_dip_are_no_collapse() -> None:
    rows = curve(reward=0.1)
    rows[-1]["critic/rewards/mean"] = 0.4
    assert not kinds(rows)


def test_a_reward_that_was_hardly_ever_given_cannot_collapse() -> None:
    assert not kinds([{**row, "critic/rewards/mean": 0.03 if row["step"] <= WINDOW else 0.0} for row in curve()])


def test_dynamic_sampling_is_measured_before_its_filter() -> None:
    """The groups that it keeps all have reward variance, and half of their answers are right."""
    assert kinds(curve(**dict(zip(SHARES, (0.01, 0.3), strict=True)))) == ["no reward variance"]
    assert not kinds(curve(**dict(zip(SHARES, (0.01, 0.97), strict=True))))


def evaluated(*points: tuple[float, float], interval: float | None = None) -> list[dict[str, Any]]:
    """A step and an evaluation each of (held out, training reward); the first evaluation is before the first step.

    Without ``interval`` only the reward is measured.
    """
    name = "val/sums/reward" if interval is None else "val/sums/pass@1"
    rows: list[dict[str, Any]] = [{name: 0.3}]
    rows += [{**USUAL, "critic/rewards/mean": reward, name: held_out} for held_out, reward in points]
    return [{"step": step, **row, "val/sums/pass@1_ci95": interval} for step, row in enumerate(rows)]


def test_held_out_falls_while_the_training_reward_rises() -> None:
    points = [(0.5, 0.4), (0.49, 0.6), (0.42, 0.7), (0.41, 0.8)]
    (found,) = find_alarms(evaluated(*points, interval=0.02))
    assert (found.kind, found.step) == ("held-out falls", 4)  # 0.49 is within the interval of 0.5
    assert "fell from 0.500 (step 1) to 0.410" in found.text
    assert kinds(evaluated(*points)) == ["held-out falls"]  # only a reward is measured
    assert not kinds(evaluated(*[(held_out, 0.4) for held_out, _ in points], interval=0.02))
    assert not kinds(evaluated(*points, interval=0.06))


def test_one_low_evaluation_is_no_fall() -> None:
    points = [(0.5, 0.4), (0.3, 0.6), (0.49, 0.7), (0.3, 0.8)]
    assert not kinds(evaluated(*points, interval=0.02))


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, True),
        ({"val/gsm8k/reward": -1.0}, True),
        ({"val/gsm8k/reward": 0.1}, False),  # partial credit
        ({"val/gsm8k/greedy": 0.1}, False),
        ({"val/gsm8k/num_tasks": FEWEST_TASKS - 1}, False),
        ({"val/gsm8k/pass@1": None, "val/gsm8k/reward": -2.0}, False),  # a reward model
        ({"val/sums/pass@1": 0.1, "val/sums/num_tasks": 64}, False),  # gsm8k is only too hard
    ],
)
def test_no_right_answer_in_the_first_evaluation(changed, found) -> None:
    row = {**FIRST, **changed}
    assert [alarm.kind for alarm in Watch().see(0, row)] == ["no reward"] * found
    assert kinds([{**USUAL, "critic/rewards/max": 0.0, "step": 1}, {**row, "step": 1}]) == ["no reward"] * found
    assert not kinds([{**USUAL, "step": 1}, {**row, "step": 1}])  # some answers were right in training


@pytest.mark.parametrize(("reward", "found"), [(0.0, True), (-1.0, True), (1.0, False)])
def test_no_reward_in_the_first_steps_of_training(reward, found) -> None:
    rows = [{**USUAL, **dict.fromkeys(REWARDS, reward), "step": step} for step in range(1, 20)]
    alarms = find_alarms(rows)
    assert [(alarm.kind, alarm.step) for alarm in alarms] == [("no reward", WINDOW)] * found


def test_supervised_training_from_nothing_gives_no_alarm() -> None:
    assert not kinds([FIRST, *({"step": step, "train/loss": 1.0} for step in range(1, 20)), {**FIRST, "step": 20}])


def test_answers_of_the_first_evaluation_are_quoted(tmp_path: Path, caplog) -> None:
    run = RunDirectory(tmp_path)
    AlarmWriter([], run).write(0, FIRST)
    run.rollouts.mkdir()
    row = {"sample": 0, "branch": 0, "greedy": False, "gold": "5", "completion": "It is\n5."}
    others = [{**row, **other} for other in ({"sample": 1}, {"greedy": True}, {"branch": 1})]
    rows = [row, *others, *({**row, "gold": gold} for gold in (None, "assert\n" * 99, "never shown"))]
    run.evaluation_path(0).write_text("".join(json.dumps(row) + "\n" for row in rows))
    AlarmWriter([], run).write(0, FIRST)
    without, line = caplog.messages
    long = "assert↵assert↵assert↵assert↵as [...]"
    assert line == f"{without}; answers: 'It is↵5.' (right: 5), 'It is↵5.' (right: ?), 'It is↵5.' (right: {long})"


def test_a_resumed_run_does_not_repeat_its_alarms(tmp_path: Path, caplog) -> None:
    rows, run = curve(repeated=0.5), RunDirectory(tmp_path)
    (found,) = find_alarms(rows)
    AlarmWriter(rows[: found.step], run).write(17, rows[-1])
    assert not caplog.records
    AlarmWriter(rows[: found.step - 1], run).write(found.step, rows[found.step - 1])
    assert caplog.messages == [f"step {found.step}: repetition: {found.text}"]


def test_the_report_has_the_lines_at_its_top(tmp_path: Path) -> None:
    rows, run = curve(repeated=0.5), RunDirectory(tmp_path)
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,) = find_alarms(rows)
    assert build_payload(run)["alarms"] == [f"step {found.step}: repetition: {found.text}"]
    page = (Path(report.__file__).parent / "page/report.js").read_text()
    assert page.index("data.alarms") < page.index("function drawResults")


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_missing_and_unfinite_numbers_change_nothing(missing) -> None:
    """The run itself sees NaN and infinities, the report null."""
    assert not kinds([{"step": row["step"], **dict.fromkeys(USUAL, missing)} for row in curve()])
    rows = curve(repeated=0.5)
    for row in rows[::3]:
        row |= {name: missing for name in USUAL if name not in REWARDS}
    assert kinds(rows) == ["repetition"]


@pytest.mark.parametrize("path", CURVES, ids=lambda path: path.stem)
def test_recorded_runs(path: Path) -> None:
    """A curve's name begins with good, or with an alarm that the run should give: ``reward_collapse-lr_x30``."""
    found = [kind.replace("-", "_").replace(" ", "_") for kind in kinds([*map(json.loads, path.open())])]
    wanted = path.stem.partition("-")[0]
    assert wanted in found if wanted != "good" else not found
