"""`--eval-only`: what the flags become, the interval, and the table."""

from __future__ import annotations

import numpy
import pytest

from megatron_rl.config.arguments import read_config
from megatron_rl.metrics.console import format_table
from megatron_rl.metrics.evaluation import by_environment, last_evaluation, result_table, with_average
from megatron_rl.rollout.evaluation import confidence, majority_is_correct
from megatron_rl.types import Completion, Grade, Rollout
from tests.support.rollouts import told

FLAGS = [
    "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32",
    "--tokenizer-model", "T", "--langrl-env-config", "E", "--run-dir", "R", "--eval-only",
]  # fmt: skip


def test_an_evaluation_needs_weights_and_nothing_of_training():
    config, problems = read_config([*FLAGS, "--load", "DIR"], 1)
    assert problems == []
    assert not config.training.perform_rl_step
    assert config.checkpoint.finetune, "weights only: neither the optimizer nor the steps of the run that made them"


def test_without_weights_it_says_which_flag_to_give():
    _, problems = read_config(FLAGS, 1)
    (problem,) = problems
    assert "--load DIR" in problem.text


def test_the_flags_of_a_training_command_do_not_stand_in_the_way():
    _, problems = read_config([*FLAGS, "--load", "DIR", "--perform-rl-step", "--lr-warmup-iters", "5"], 1)
    assert problems == []


@pytest.mark.parametrize(
    ("by_task", "samples", "draws"),
    [
        ([0.0, 0.5, 1.0], 6, 3),  # 0.25 of a draw, 0.25 / 3 of the mean: the samples of a task are alike
        ([0.25, 0.75] * 4, 64, 28),  # 0.25 of a draw, 1/14 of a task, 1/112 of the mean
        ([0.5] * 50, 200, 200),  # no spread over tasks: every sample is a draw
        ([1.0] * 200, 1600, 200),  # all right: tasks
        ([0.0] * 8, 64, 8),
    ],
)
def test_the_interval_is_wilsons_over_tasks(by_task, samples, draws):
    """As the roots of (p - mean)^2 = 1.96^2 p (1 - p) / draws."""
    mean, z = numpy.mean(by_task), 1.96**2 / draws
    ends = numpy.roots([1 + z, -2 * mean - z, mean**2])
    found = confidence(numpy.array(by_task), samples)
    assert found == pytest.approx(abs(ends - mean).max(), rel=1e-6)
    assert found > 0


def test_the_table_has_a_row_for_each_environment():
    metrics = {
        "step": 0.0, "val/b/pass@1": 0.25, "val/b/pass@1_ci95": 0.1, "val/b/pass@8": 0.5, "val/b/pass@16": 0.75,
        "val/b/greedy": 0.3, "val/b/num_tasks": 30.0, "val/b/response_length": 12.34, "val/a/pass@1": 1.0,
    }  # fmt: skip
    assert by_environment(metrics)["a"] == {"pass@1": 1.0}
    header, _, first, second = format_table(*result_table(metrics)).splitlines()
    assert [cell.strip() for cell in header.split("|")] == [
        "environment", "pass@1 = avg@k", "pass@8", "pass@16", "greedy", "tokens", "tasks",
    ]  # fmt: skip
    assert [cell.strip() for cell in first.split("|")] == ["a", "1.000", "-", "-", "-", "-", "-"]
    cells = [cell.strip() for cell in second.split("|")]
    assert cells == ["b", "0.250 ± 0.100", "0.500", "0.750", "0.300", "12.3", "30"]


def test_the_file_has_avg_at_k_under_its_own_name():
    assert with_average({"a": {"pass@1": 0.25, "pass@4": 0.5}, "b": {"greedy": 1.0}}) == {
        "a": {"pass@1": 0.25, "pass@4": 0.5, "avg@k": 0.25}, "b": {"greedy": 1.0},
    }  # fmt: skip


def test_the_newest_evaluation_is_shown():
    rows = [{"step": 0, "val/a/greedy": 0.5}, {"step": 8, "val/a/greedy": 1.0}, {"step": 9, "actor/lr": 1.0}]
    assert last_evaluation(rows) is rows[1]
    assert last_evaluation(rows[2:]) == {}


@pytest.mark.parametrize(
    ("answers", "right"),
    [
        ([("4", 1.0), ("5", 0.0), ("4", 1.0)], True),
        ([("4", 1.0), ("5", 0.0), ("5", 0.0)], False),
        ([("5", 0.0), ("4", 1.0)], False),  # as many votes: the first given
        ([(None, 0.0), (None, 0.0), ("4", 1.0)], True),  # who gives no answer does not vote
        ([(None, 0.0)], False),
    ],
)
def test_the_majority_votes_by_extracted_answer(answers, right):
    completion = Completion((1,), (0.0,), "stop", 0)
    graded = [Rollout(completion, "", told(Grade(reward, extracted=text))) for text, reward in answers]
    assert majority_is_correct(graded) == right
