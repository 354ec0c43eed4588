"""`--eval-only`: what the flags become, the interval, and the table."""

from __future__ import annotations

import numpy
import pytest

from megatron_rl.config import read_config
from megatron_rl.metrics.evaluation import by_environment, last_evaluation, result_table, with_average
from megatron_rl.metrics.table import format_table
from megatron_rl.rollout.evaluation import confidence, majority_is_correct
from megatron_rl.types import Completion, Grade, Rollout

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


def test_the_interval_is_over_tasks():
    """Means 0, 0.5, 1: standard deviation 0.5, standard error 0.5 / sqrt(3) = 0.2887, times 1.96 = 0.5658."""
    assert confidence(numpy.array([0.0, 0.5, 1.0])) == pytest.approx(0.5658, abs=1e-4)


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
    graded = [Rollout(completion, "", Grade(reward, extracted=text)) for text, reward in answers]
    assert majority_is_correct(graded) == right
