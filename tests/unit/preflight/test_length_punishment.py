"""What environments declare and the run's flags contradict is refused before the run."""

from __future__ import annotations

import pytest

from megatron_rl.run.preflight.inputs import environment_problems
from tests.support.tiny import tiny_config

CASES = [(4, 12, True), (4, 13, False), (4, 16, False), (0, 1, False)]


@pytest.mark.parametrize(("buffer", "longest", "refused"), CASES)
def test_the_buffer_must_be_within_reach(tmp_path, buffer, longest, refused):
    """Of 16 tokens the last 4 are punished: the 13th is the first."""
    path = tmp_path / "list.yaml"
    options = f"train_tasks: 8, test_tasks: 2, overlong_buffer: {buffer}, max_response_tokens: 16"
    path.write_text(f"- {{environment: countdown, args: {{{options}}}}}\n")
    problems = environment_problems(tiny_config(langrl_env_config=path, rl_max_new_tokens=longest), tokenizer=None)
    wanted = f"countdown: overlong_buffer 4 of max_response_tokens 16 begins beyond the {longest} tokens of"
    assert [problem.text.startswith(wanted) for problem in problems] == [True] * refused


@pytest.mark.parametrize(
    ("environment", "flags", "refused"),
    [
        ("signed", {"rl_advantage": "maxrl"}, True),
        ("signed", {"rl_advantage": "maxrl", "rl_advantage_args": ("lowest=-1",)}, False),
        ("signed", {}, False),
        ("countdown", {"rl_advantage": "maxrl"}, False),
    ],
)
def test_rewards_that_the_advantage_would_refuse(tmp_path, environment, flags, refused):
    path = tmp_path / "list.yaml"
    named = {"signed": "tests.support.e2e_environments:Signed"}.get(environment, environment)
    path.write_text(f"- {{environment: '{named}'}}\n")
    problems = environment_problems(tiny_config(langrl_env_config=path, **flags), tokenizer=None)
    wanted = "its rewards begin at -1, and --rl-advantage maxrl takes none below 0; use --rl-advantage-args lowest=-1"
    assert [wanted in problem.text for problem in problems] == [True] * refused


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ({"pipeline_model_parallel_size": 2}, True),
        ({"expert_model_parallel_size": 2, "num_experts": 4, "moe_ffn_hidden_size": 24}, True),
        ({}, False),
        ({"pipeline_model_parallel_size": 2, "rl_partial_rollouts": False}, False),
    ],
)
def test_conversations_that_cannot_wait_for_the_next_step(tmp_path, flags, refused):
    path = tmp_path / "list.yaml"
    path.write_text("- {environment: calculator}\n")
    config = tiny_config(world_size=2, **{"langrl_env_config": path, "rl_partial_rollouts": True} | flags)
    problems = environment_problems(config, tokenizer=None)
    wanted = "turns cannot be interrupted by --rl-partial-rollouts over pipeline stages or expert-parallel ranks"
    assert [wanted in problem.text for problem in problems] == [True] * refused


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({"rl_partial_rollouts": True, "pipeline_model_parallel_size": 2}, "its calls of a harness"),
        ({"rl_partial_rollouts": True}, None),
        ({}, None),
    ],
)
def test_harnesses_where_they_cannot_run(tmp_path, flags, wanted):
    path = tmp_path / "list.yaml"
    path.write_text("- {environment: 'tests.support.e2e_environments:TalksByHarness'}\n")
    problems = environment_problems(tiny_config(world_size=2, langrl_env_config=path, **flags), tokenizer=None)
    assert [wanted in problem.text for problem in problems] == [True] * (wanted is not None)


def test_samples_that_are_compared_do_not_wait_one_by_one(tmp_path):
    path = tmp_path / "list.yaml"
    path.write_text("- {environment: 'tests.support.e2e_environments:ComparedTalks', grade_deadline: 5}\n")
    flags = {"langrl_env_config": path, "world_size": 2}
    assert environment_problems(tiny_config(**flags), tokenizer=None) == []
    (problem,) = environment_problems(tiny_config(**flags, rl_partial_rollouts=True), tokenizer=None)
    assert "a harness with grade_group cannot be interrupted by --rl-partial-rollouts" in problem.text


@pytest.mark.parametrize(("url", "is_served"), [("reference", False), ("policy", True)])
def test_a_judge_that_nobody_serves(tmp_path, url, is_served):
    (tmp_path / "rows.jsonl").write_text('{"q": "2+3?"}\n' * 2)
    path = tmp_path / "list.yaml"
    options = f"path: {tmp_path}/rows.jsonl, prompt: q, held_out: 0, judge: {{url: {url}}}"
    path.write_text(f"- {{environment: judge, args: {{{options}}}}}\n")
    problems = environment_problems(tiny_config(langrl_env_config=path), tokenizer=None)
    wanted = "url is 'reference'; give http(s)://HOST/v1 (of `megatron-rl serve`, or another), or policy"
    assert [wanted in problem.text for problem in problems] == [True] * (not is_served)


@pytest.mark.parametrize(("both", "refused"), [(True, False), (False, True)])
def test_data_that_is_trained_on_whole_beside_data_that_is_evaluated(tmp_path, both, refused):
    """Only where nothing at all could be evaluated is an evaluation refused."""
    path = tmp_path / "list.yaml"
    trained = "- {environment: countdown, args: {train_tasks: 8, test_tasks: 0}}\n"
    measured = "- {environment: arithmetic, args: {train_tasks: 4, test_tasks: 4}, evaluation_only: true}\n"
    path.write_text(trained + measured * both)
    problems = environment_problems(tiny_config(langrl_env_config=path, eval_interval=2), tokenizer=None)
    wanted = "countdown: there are no test tasks, which --eval-interval needs"
    assert [wanted in problem.text for problem in problems] == [True] * refused
