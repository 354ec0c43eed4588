"""`--eval-only`, as a user starts it: results and answers in the files and in the report."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import Outcome, facts_of, records_of, rows_of, run_many
from tests.unit.metrics.test_report_html import embedded_data

MODULE = "tests.support.e2e_environments"


@pytest.fixture(scope="module")
def outcomes(workshop, warm_start) -> dict[str, Outcome]:
    """Evaluations of two environments, of a list nothing can be trained on, of a bad one, and a run that trains."""
    two = workshop.environments(
        "two",
        [
            {"environment": f"{MODULE}:Digits"},
            {"environment": f"{MODULE}:Unreliable", "weight": 0.5, "eval_prompts": 2, "eval_samples": 3},
        ],
    )
    held_out = workshop.environments(
        "held_out", [{"environment": f"{MODULE}:Digits", "evaluation_only": True, "weight": 0.0}]
    )
    bad = {"environment": f"{MODULE}:Unreliable", "args": {"always": True}}
    hopeless = workshop.environments("hopeless", [{"environment": f"{MODULE}:Digits"}, bad])
    evaluation = {"eval_only": True, "load": warm_start, "rl_samples_per_eval_prompt": 2, "rl_prompts_per_eval": 4}
    commands = {
        "alone": workshop.rl("alone", **evaluation, langrl_env_config=two, rl_log_rollouts=3),
        "held_out": workshop.rl("held_out", **evaluation, langrl_env_config=held_out),
        "ungraded": workshop.rl("ungraded", **evaluation, langrl_env_config=hopeless),
        "trained": workshop.rl("trained", save_interval=2, eval_interval=2, rl_prompts_per_eval=4, rl_log_rollouts=1),
    }
    found = dict(zip(commands, run_many(list(commands.values())), strict=True))
    steps = str(workshop.run_dir("trained") / "checkpoints" / "*")
    evaluation["rl_rollout_quantization"] = "int8"
    several = workshop.rl("several", **evaluation | {"load": steps})
    last = workshop.rl("last", **evaluation | {"load": steps.replace("*", "step_0000004")})
    return found | dict(zip(("several", "last"), run_many([several, last]), strict=True))


def report_of(run_dir: Path) -> dict[str, Any]:
    """What the run's page shows."""
    return embedded_data((run_dir / "report.html").read_text(encoding="utf-8"))


def test_results_are_on_the_screen_in_a_file_and_in_the_report(outcomes, workshop):
    output, run_dir = outcomes["alone"].check().output, workshop.run_dir("alone")
    results = json.loads((run_dir / "evaluation.json").read_text())
    assert set(results) == {"digits", "unreliable"}
    digits = results["digits"]
    assert {"pass@1", "pass@1_ci95", "pass@2", "avg@k", "greedy", "response_length", "truncated"} <= set(digits)
    assert digits["avg@k"] == digits["pass@1"]
    page = report_of(run_dir)
    assert page["evaluation"]["step"] == 0
    assert page["evaluation"]["headers"][:3] == ["environment", "pass@1 = avg@k", "pass@2"]
    first = page["evaluation"]["rows"][0]
    assert first[:2] == ["digits", f"{digits['pass@1']:.3f} \u00b1 {digits['pass@1_ci95']:.3f}"]
    assert all(cell in output for cell in (*page["evaluation"]["headers"], *first))
    assert facts_of(run_dir)["status"] == "finished"


def test_the_answers_are_in_the_report(outcomes, workshop):
    """As many tasks and samples as the flags say, or the environment's entry; and a greedy answer of each task."""
    outcomes["alone"].check()
    run_dir = workshop.run_dir("alone")
    assert [path.name for path in (run_dir / "rollouts").iterdir()] == ["eval_000000.jsonl"]
    rows = records_of(run_dir / "rollouts" / "eval_000000.jsonl")
    assert [row["environment"] for row in rows] == ["digits"] * 9 + ["unreliable"] * 8
    assert [(row["sample"], row["greedy"]) for row in rows[:3]] == [(0, False), (1, False), (0, True)]
    [shown] = report_of(run_dir)["rollouts"]
    numbers = [number for group in shown["groups"] for sample in group["samples"] for number in sample["samples"]]
    assert (shown["label"], len(shown["groups"]), len(numbers)) == ("held-out, step 0", 5, 17)


def test_a_list_for_evaluation_alone_needs_nothing_to_train_on(outcomes, workshop):
    outcomes["held_out"].check()
    assert set(json.loads((workshop.run_dir("held_out") / "evaluation.json").read_text())) == {"digits"}


def test_training_keeps_the_names_of_its_rollouts(outcomes, workshop):
    outcomes["trained"].check()
    run_dir = workshop.run_dir("trained")
    names = sorted(path.name for path in (run_dir / "rollouts").iterdir())
    steps = [f"step_{step:06d}.jsonl" for step in (1, 2, 3, 4)]
    assert names == [*(f"eval_{step:06d}.jsonl" for step in (0, 2, 4)), *steps]
    assert report_of(run_dir)["evaluation"]["step"] == 4
    assert not (run_dir / "evaluation.json").exists()
    assert rows_of(run_dir)[-1]["step"] == 4


def test_all_checkpoints_of_a_run_in_one_call(outcomes, workshop):
    """Quantised copies are made anew for each: the last one's results are those of its own evaluation."""
    output, run_dir = outcomes["several"].check().output, workshop.run_dir("several")
    results = json.loads((run_dir / "evaluation.json").read_text())
    assert list(results) == ["2", "4"]
    assert results["2"] != results["4"]
    outcomes["last"].check()
    assert results["4"] == json.loads((workshop.run_dir("last") / "evaluation.json").read_text())
    assert [row["step"] for row in rows_of(run_dir)] == [2, 4]
    table = [line.split() for line in output.splitlines() if "| digits" in line and "pass@1" not in line]
    assert [line[0] for line in table] == ["2", "4"]
    names = sorted(path.name for path in (run_dir / "rollouts").iterdir())
    assert names == ["eval_000002.jsonl", "eval_000004.jsonl"]


def test_an_evaluation_whose_grades_all_fail_has_no_result(outcomes, workshop):
    output, run_dir = outcomes["ungraded"].check(1).output, workshop.run_dir("ungraded")
    assert "the evaluation has no result on 'unreliable': every grade failed (invalid_reward " in output
    assert "Traceback" not in output
    assert not (run_dir / "evaluation.json").exists()
    assert facts_of(run_dir)["status"] == "failed"
    deadline = time.monotonic() + 60  # a process of its own writes it, which may outlive the run
    while not (run_dir / "report.html").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    page = report_of(run_dir)
    assert page["status"] == "failed" and "no result on 'unreliable'" in page["error"]
