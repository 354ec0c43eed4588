"""The environment ``judge``: answers of the policy that another model, or the policy, grades."""

from __future__ import annotations

import contextlib
import json

import httpx
import pytest

from megatron_rl.environments.judging import Judge, JudgeSettings
from megatron_rl.environments.loader import find_environment
from megatron_rl.environments.selftest import script_of, scripted_model
from megatron_rl.environments.workers import WorkerPool
from megatron_rl.errors import ConfigError
from megatron_rl.types import HarnessRun

openai = pytest.importorskip("openai", reason="the extra agents is not installed")
from megatron_rl.environments.harness import run_harness  # noqa: E402 - it needs the extra, too


@pytest.fixture
def options(tmp_path):
    """Of a list entry, without the judge."""
    row = {"q": "Why is the sky blue?", "gold": "Air scatters blue light."}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return {"path": str(tmp_path / "rows.jsonl"), "prompt": "q", "reference": "gold"}


def judged(options, judge, answers, *, url="/v1"):
    """The grade of one sample whose model says ``answers``."""
    environment = find_environment("judge").from_options(options | {"judge": judge})
    [task] = environment.tasks("train")
    with scripted_model(script_of(answers)) as policy:
        return run_harness(environment, HarnessRun(task, 0, policy.removesuffix("/v1") + url, "key-of-the-session"))


def test_another_model_grades(options):
    with scripted_model(lambda _: "8") as judge:
        grade = judged(options, {"url": judge}, ["Scattering."])
    assert (grade.reward, grade.code) == (0.8, "")


def test_the_policy_grades_itself_outside_of_its_session(options):
    # the scripted model answers at any path: that the judge's call has no session is for the next test
    assert judged(options, {}, ["Scattering.", "6"], url="/sessions/s1/v1").reward == 0.6


@pytest.mark.parametrize("base", ["http://h:1/sessions/a-b/v1", "http://h:1/sessions/a-b/v1/", "http://h:1/v1"])
def test_the_url_of_the_policy_without_its_session(base, monkeypatch):
    asked = []

    def answer(self, request: httpx.Request) -> httpx.Response:
        asked.append((str(request.url), request.headers["Authorization"]))
        return httpx.Response(200, json={"choices": [{"message": {"content": "8"}}]})

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", answer)
    Judge(JudgeSettings(), openai.OpenAI(base_url=base, api_key="k")).verdict("q", "a")
    assert asked == [("http://h:1/v1/chat/completions", "Bearer k")]


def test_the_judge_reads_question_answer_and_reference(options):
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Judge, "verdict", lambda _, *shown: asked.append(shown) or 1.0)
        assert judged(options, {}, ["Scattering."]).reward == 1.0
    assert asked == [("Why is the sky blue?", "Scattering.", "Air scatters blue light.")]


def test_an_empty_answer_is_worth_nothing_and_not_judged(options):
    grade = judged(options, {}, [" \n"])
    assert (grade.reward, grade.status) == (0.0, "no_answer")


def test_a_judge_without_a_verdict_masks_the_sample(options):
    grade = judged(options, {}, ["Scattering.", "no idea"])
    assert (grade.reward, grade.code) == (None, "environment_exception")
    assert "JudgeError: the judge's answer has no verdict to read: 'no idea'" in grade.message


def test_a_prompt_of_plain_text(options):
    assert judged(options | {"chat": False}, {}, ["Scattering.", "5"]).reward == 0.5


def test_the_key_reaches_the_process_of_a_sample_and_no_other(options, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "key-of-the-judge")
    with scripted_model(lambda _: "8") as url:
        options |= {"judge": {"url": url, "key_variable": "JUDGE_KEY"}}
        environment = find_environment("judge").from_options(options)
        assert environment.variables == ("JUDGE_KEY",)
        [task] = environment.tasks("train")
        run = HarnessRun(task, 0, url, "key-of-the-session")
        for variables, wanted in ((environment.variables, 0.8), ((), None)):
            with contextlib.closing(WorkerPool.for_harnesses(1, [("judge", options)], variables)) as pool:
                [grade] = pool.run("judge", options, [run], 60.0, lambda: False)
            assert grade.reward == wanted, grade
    assert "the environment variable JUDGE_KEY" in grade.message


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"judge": {"urll": "x"}}, "judge has no key 'urll'"),
        ({"judge": {"url": "http://a/v1", "key_variable": "NO_SUCH_VARIABLE_AT_ALL"}}, "is not set"),
        ({"reward": "math"}, "reward is what the judge says"),
    ],
)
def test_options_that_make_no_sense(options, given, problem):
    with pytest.raises(ConfigError, match=problem):
        find_environment("judge").from_options(options | given)
