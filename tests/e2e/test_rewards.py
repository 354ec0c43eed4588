"""Rewards that are no rewards, prompts that do not fit: left out, counted, and never in an advantage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import differences, state_of
from tests.support.runs import Outcome, facts_of, rows_of, run_many

LAST = Path("checkpoints") / "step_0000004"
MODULE = "tests.support.e2e_environments"


@pytest.fixture(scope="module")
def outcomes(workshop) -> dict[str, Outcome]:
    """Seven runs in one process."""

    def environment(name: str, kind: str, **options: Any) -> Path:
        return workshop.environments(name, [{"environment": f"{MODULE}:{kind}", "args": options}])

    (workshop.folder / "unwell").touch()
    unreliable, hopeless = environment("some_bad", "Unreliable"), environment("all_bad", "Unreliable", always=True)
    tolerant = {"rl_max_failed_share": 1, "rl_log_rollouts": 16}
    commands = {
        "tolerated": workshop.rl(
            "tolerated", langrl_env_config=unreliable, **tolerant, eval_interval=2, rl_prompts_per_eval=4
        ),
        "strict": workshop.rl("strict", langrl_env_config=unreliable),
        "hopeless": workshop.rl("hopeless", langrl_env_config=hopeless),
        "hopeless_tolerated": workshop.rl("hopeless_tolerated", langrl_env_config=hopeless, **tolerant),
        "unwell": _unwell(workshop, "unwell"),
        "long": workshop.rl("long", langrl_env_config=environment("long", "Digits", count=16, long_every=4)),
        "too_long": workshop.rl("too_long", langrl_env_config=environment("too_long", "Digits", long_every=1)),
    }
    return dict(zip(commands, run_many(list(commands.values())), strict=True))


def _unwell(workshop, name: str, **flags: Any) -> list[str]:
    """A run that cannot be graded while there is a file of its name."""
    environment = {"environment": f"{MODULE}:Unwell", "args": {"broken": str(workshop.folder / name)}}
    listed = workshop.environments(name, [environment])
    return workshop.rl(name, langrl_env_config=listed, save_interval=1, rl_log_rollouts=4, **flags)


def _records(run_dir: Path, step: int) -> list[dict[str, Any]]:
    lines = (run_dir / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_bad_rewards_are_masked_and_counted(outcomes, workshop):
    outcomes["tolerated"].check()
    run_dir = workshop.run_dir("tolerated")
    rows = [row for row in rows_of(run_dir) if row["step"]]
    assert sum(row["training/failed_grades"] for row in rows) >= 4
    for row in rows:
        assert "nonfinite" not in row
        records = _records(run_dir, row["step"])
        assert len(records) == 16
        bad = [record for record in records if record["status"] != "ok"]
        assert {record["code"] for record in bad} <= {"invalid_reward"}
        assert all(record["reward"] is None for record in bad)
        assert row["training/failed_grades"] == len(bad)
        good = [record["reward"] for record in records if record["status"] == "ok"]
        assert row["critic/rewards/mean"] == pytest.approx(sum(good) / len(good))
        assert abs(row["critic/advantages/max"]) < 4
    assert rows[-1]["val/unreliable/failed_grades"] > 0


def test_too_many_bad_rewards_stop_the_run_with_the_counts(outcomes, workshop):
    line = next(line for line in outcomes["hopeless"].check(1).output.splitlines() if "ERROR" in line)
    assert "16 of 16 grades failed (invalid_reward 16), more than the 5% allowed" in line
    assert "Traceback" not in outcomes["hopeless"].output
    facts = facts_of(workshop.run_dir("hopeless"))
    assert facts["status"] == "failed"
    assert "16 of 16" in facts["error"]
    assert "of 16 grades failed (invalid_reward" in outcomes["strict"].check(1).output


def test_a_run_that_failed_grades_have_stopped_is_resumed(outcomes, workshop):
    """The journal kept the completions and not the failures: the run ends as the one whose grader was always well."""
    assert "grades failed (environment_exception" in outcomes["unwell"].check(1).output
    (workshop.folder / "unwell").unlink()
    resumed, other = run_many([_unwell(workshop, "unwell", resume=True), _unwell(workshop, "well")])
    other.check()
    assert "4 of 4 groups were answered before" in resumed.check().output
    run_dir, well = workshop.run_dir("unwell"), workshop.run_dir("well")
    assert rows_of(run_dir) == rows_of(well)
    assert [_records(run_dir, step) for step in (1, 2, 3, 4)] == [_records(well, step) for step in (1, 2, 3, 4)]
    assert differences(run_dir / LAST, well / LAST) == []


def test_steps_without_a_single_grade_change_nothing_and_the_exit_code_tells(outcomes, workshop):
    output = outcomes["hopeless_tolerated"].check(3).output
    assert output.count("no group had reward variance for 3 steps in a row") == 1
    assert "in the last one all 16 grades failed" in output
    assert "finished without a single update" in output
    run_dir = workshop.run_dir("hopeless_tolerated")
    assert [row["training/failed_grades"] for row in rows_of(run_dir)] == [16] * 4
    assert not any("actor/pg_loss" in row or "nonfinite" in row for row in rows_of(run_dir))
    assert state_of(run_dir / "checkpoints" / "step_0000004")["components"]["progress"]["updates"] == 0


def test_long_prompts_are_skipped_and_counted(outcomes, workshop):
    """Of 16 tasks 4 are too long: an epoch gives 12 prompts and skips 4."""
    outcomes["long"].check()
    run_dir = workshop.run_dir("long")
    drawn = state_of(run_dir / "checkpoints" / "step_0000004")["components"]["prompts"]["digits"]
    skipped = [row["training/skipped_prompts"] for row in rows_of(run_dir)]
    assert drawn == 16 + sum(skipped)
    assert sum(skipped) >= 4
    assert max(row["prompt_length/mean"] for row in rows_of(run_dir)) < 10


def test_a_run_whose_prompts_are_all_too_long_says_so(outcomes):
    output = outcomes["too_long"].check(1).output
    assert "no prompt of 'digits' fits in 32 tokens; raise --inference-max-seq-length" in output
    assert "Traceback" not in output
