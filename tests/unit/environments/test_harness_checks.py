"""What is found wrong with a harness before a run, and its self-test."""

from __future__ import annotations

import subprocess
import sys

import httpx
import pytest

from megatron_rl.environments.__main__ import main
from megatron_rl.environments.loading import survey_list
from megatron_rl.environments.selftest import rehearse, script_of, scripted_model
from tests.unit.environments.conftest import problems_of
from tests.unit.environments.harnesses import Talk


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ("harnesses:Talk", ""),
        ("harnesses:Talk\n  run_deadline: 30", ""),
        ("harnesses:Missing", "'harnesses:Missing' lacks run"),
        ("harnesses:Turns", "turns has max_turns 4, but a harness calls the model as often as it likes; leave it out"),
        ("harnesses:Inside", "inside has in_process, but a sample of a harness has a process; leave it out"),
        ("harnesses:Endless", "endless has run_deadline inf; give seconds, above 0 and up to 86400"),
        ("harnesses:Talk\n  run_deadline: 0", "run_deadline is 0; give seconds, above 0 and up to 86400"),
        ("harnesses:Talk\n  in_process: true", "talk is given in_process, which is of graders, and it is a harness"),
        ("harnesses:Talk\n  grade_deadline: 9", "talk is given grade_deadline, which is of graders"),
        ("arithmetic\n  run_deadline: 9", "arithmetic is given run_deadline, which is of harnesses, and it is none"),
    ],
)
def test_a_harness_that_cannot_be_run_is_one_line(tmp_path, hostile_path, entry, line):
    path = tmp_path / "list.yaml"
    path.write_text(f"- environment: {entry}\n")
    problems = problems_of(path)
    assert len(problems) == bool(line)
    assert not line or line in problems[0]


def test_without_the_openai_package_the_line_names_the_extra(tmp_path, hostile_path, monkeypatch):
    path = tmp_path / "list.yaml"
    path.write_text("- environment: harnesses:Talk\n")
    monkeypatch.setitem(sys.modules, "openai", None)
    (problem,) = problems_of(path)
    assert "talk is a harness, which needs the openai package; pip install 'megatron-rl[agents]'" in problem


def test_the_checks_of_a_run_know_a_harness(tmp_path, hostile_path):
    path = tmp_path / "list.yaml"
    path.write_text("- environment: harnesses:Talk\n- environment: arithmetic\n")
    assert [each.is_harness for each in survey_list(path)] == [True, False]


def test_new_writes_a_harness_whose_test_passes(capsys, tmp_path, monkeypatch):
    assert main(["new", "odd_or_even", "--kind", "harness", "--dir", str(tmp_path)]) == 0
    monkeypatch.syspath_prepend(str(tmp_path))
    capsys.readouterr()
    assert main(["test", "odd_or_even:OddOrEven", "--limit", "2"]) == 0
    shown = capsys.readouterr().out
    assert "gold answers    ok    4 at 1" in shown and "empty answers   ok    4 at 0" in shown
    test = tmp_path / "odd_or_even" / "test_odd_or_even.py"
    run = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(test)]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_the_self_test_says_what_the_model_was_asked_too_much(capsys, hostile_path):
    assert main(["test", "harnesses:Careless"]) == 1
    shown = capsys.readouterr().out
    assert "gold answers    FAIL" in shown and "the script ends after 1 turns" in shown
    assert "empty answers   FAIL" in shown and "could not convert string to float" in shown


def test_a_proxy_of_the_machine_does_not_come_between(hostile_path, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # where nobody listens
    environment = Talk()
    assert rehearse(environment, next(environment.tasks("train")), ["7"]).reward == 7.0


@pytest.mark.parametrize("path", ["responses", "messages"])
def test_the_scripted_model_answers_other_apis(path: str):
    """As the endpoint does, but for streams."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turns = ["It is 3", {"role": "assistant", "content": None, "tool_calls": [call]}]
    asked = {"model": "policy", "max_tokens": 9, "input": "1+2", "messages": [{"role": "user", "content": "1+2"}]}
    with scripted_model(script_of(turns)) as url:
        text, called = (httpx.post(f"{url}/{path}", json=asked).json() for _ in turns)
        ended = httpx.post(f"{url}/{path}", json=asked)
    with scripted_model(script_of(turns)) as url:
        streamed = httpx.post(f"{url}/{path}", json=asked | {"stream": True})
    assert (ended.status_code, streamed.status_code) == (400, 400)
    assert "stream" in streamed.json()["error"]["message"]
    if path == "messages":
        assert (text["content"], text["stop_reason"]) == ([{"type": "text", "text": "It is 3"}], "end_turn")
        assert called["content"] == [{"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}]
        assert called["stop_reason"] == "tool_use"
    else:
        assert [item["content"][0]["text"] for item in text["output"]] == ["It is 3"]
        assert called["output"] == [{"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}]
