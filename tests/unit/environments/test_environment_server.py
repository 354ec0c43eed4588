"""The server over real HTTP, with requests nobody should send."""

from __future__ import annotations

import http.client
import json
import os
import stat
from urllib.parse import urlsplit

import pytest

from megatron_rl.environments.server import MAX_BODY_BYTES, create_app, serve
from megatron_rl.environments.service import Service
from megatron_rl.errors import ConfigError

GRADE = "/v1/environments/steady/grade"


def test_health_needs_no_token(call):
    assert call("GET", "/v1/health", headers={}) == (200, {"status": "ok"})


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic x"}, {"Authorization": "Bearer \xe9"}],
)
@pytest.mark.parametrize("path", ["/v1/environments", "/v1/environments/steady/tasks", "/no/such/page"])
def test_everything_else_does(call, path, headers):
    status, answer = call("GET", path, headers=headers)
    assert status == 401
    assert "token" in answer["message"]


def test_grading_without_a_token_grades_nothing(call, transcript_json):
    body = {"items": [transcript_json("abc")]}
    assert call("POST", GRADE, body, headers={})[0] == 401


def test_address_file_is_private(server):
    assert stat.S_IMODE(os.stat(server.address_file).st_mode) == 0o600
    assert [name for name in os.listdir(server.address_file.parent) if name.startswith(".")] == []


def test_a_group_without_answers_is_refused_and_the_next_one_graded(call):
    task = {"id": "1", "prompt": "?", "data": {}}
    answers = [{"text": text, "finish_reason": "stop", "num_tokens": 1} for text in ("a", "b")]
    path = "/v1/environments/distinct/grade_group"
    status, refused = call("POST", path, {"task": task, "transcripts": []})
    assert (status, refused["message"]) == (422, "group.transcripts is empty; a group has at least one answer")
    status, graded = call("POST", path, {"task": task, "transcripts": answers})
    assert (status, len(graded["items"])) == (200, 2)


def test_listing(call):
    _, answer = call("GET", "/v1/environments")
    assert [item["name"] for item in answer["items"]] == ["arithmetic", "steady", "rewards", "distinct", "bad_rows"]
    status, answer = call("GET", "/v1/environments/steady")
    assert status == 200
    assert answer["description"] == "Grades by the length of the text, and fails where the text asks for it."


def test_tasks_are_paged(call):
    path = "/v1/environments/arithmetic/tasks?split=test"
    _, whole = call("GET", path)
    assert whole["total"] == len(whole["items"]) == 7
    _, first = call("GET", path + "&offset=0&limit=4")
    _, second = call("GET", path + "&offset=4&limit=4")
    assert first["items"] + second["items"] == whole["items"]
    assert set(whole["items"][0]) == {"id", "prompt", "data"}
    assert call("GET", path + "&offset=99")[1]["items"] == []


def test_demonstrations_are_paged(call):
    _, page = call("GET", "/v1/environments/arithmetic/demonstrations?split=train&offset=28&limit=10")
    assert page["total"] == 30
    assert len(page["items"]) == 2
    assert set(page["items"][0]) == {"task", "completion"}


def test_a_bad_split_is_named(call):
    status, answer = call("GET", "/v1/environments/arithmetic/tasks?split=valid")
    assert status == 422
    assert answer["message"].startswith("split is 'valid'")


def test_unusable_tasks_are_an_error_that_names_the_row(call):
    status, answer = call("GET", "/v1/environments/bad_rows/tasks")
    assert status == 500
    assert "train row 1 is a dict" in answer["message"]
    assert "question, answer" in answer["message"]


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/nothing"), ("GET", "/"), ("GET", "/static/x")])
def test_unknown_url_answers_json(call, method, path):
    status, answer = call(method, path)
    assert status == 404
    assert answer["message"]


def test_wrong_method_answers_json(call):
    assert call("DELETE", GRADE)[0] == 405
    assert call("GET", GRADE)[0] == 405


@pytest.mark.parametrize("path", ["", "/tasks", "/grade"])
def test_unknown_environment_names_the_nearest(call, path):
    method = "POST" if path == "/grade" else "GET"
    status, answer = call(method, f"/v1/environments/arithmatic{path}", {} if method == "POST" else None)
    assert status == 404
    assert "did you mean 'arithmetic'" in answer["message"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"{'a': 1}", b'{"x": NaN}', b'{"x": Infinity}', b"\xff\xfe", b"[" * 100_000, b"9" * 5000],
)
def test_bad_json_is_refused(call, body):
    status, answer = call("POST", GRADE, body)
    assert status == 400
    assert answer["message"].startswith("the body is not JSON")


@pytest.mark.parametrize(
    ("path", "named"),
    [
        (["items"], "items"),
        (["items", 1, "task"], "items[1].task"),
        (["items", 1, "task", "id"], "items[1].task.id"),
        (["items", 1, "task", "data"], "items[1].task.data"),
        (["items", 1, "transcript", "text"], "items[1].transcript.text"),
        (["items", 1, "transcript", "finish_reason"], "items[1].transcript.finish_reason"),
    ],
)
def test_missing_and_wrong_keys_are_named(call, transcript_json, path, named):
    body = {"items": [transcript_json("a"), transcript_json("b")]}
    holder = body
    for key in path[:-1]:
        holder = holder[key]
    del holder[path[-1]]
    status, answer = call("POST", GRADE, body)
    assert (status, answer["message"].partition(" is missing")[0]) == (422, named)
    holder[path[-1]] = 7
    status, answer = call("POST", GRADE, body)
    assert status == 422
    assert named in answer["message"]


@pytest.mark.parametrize("body", [[], 3, None, "x", {"items": [1]}])
def test_bodies_of_another_shape_are_refused(call, body):
    assert call("POST", GRADE, json.dumps(body).encode())[0] == 422


def test_unknown_finish_reason_is_refused(call, transcript_json):
    item = transcript_json("a")
    item["transcript"]["finish_reason"] = "eos"
    status, answer = call("POST", GRADE, {"items": [item]})
    assert status == 422
    assert "use one of stop, length, stop_string" in answer["message"]


def test_too_large_a_body_is_refused(call):
    status, answer = call("POST", GRADE, b" " * (MAX_BODY_BYTES + 1))
    assert status == 413
    assert answer["message"]


def test_a_huge_body_is_refused_by_its_header_alone(address):
    connection = http.client.HTTPConnection(urlsplit(address.url).netloc, timeout=5)
    connection.putrequest("POST", GRADE)
    connection.putheader("Content-Length", str(2**30))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_one_bad_item_costs_no_other(call, transcript_json):
    texts = ["abcd", "raise", "exit", "ab"]
    body = {"items": [transcript_json(text) for text in texts]}
    status, answer = call("POST", GRADE, body)
    assert status == 200
    good, raised, exited, also_good = answer["items"]
    assert (good["status"], good["reward"], good["metrics"]["long"]) == ("ok", 4.0, 1.0)
    assert (also_good["status"], also_good["reward"]) == ("ok", 2.0)
    assert (raised["status"], raised["code"]) == ("error", "environment_exception")
    assert "KeyError: 'no such thing' (hostile_environments.py:" in raised["message"]
    assert "reward" not in raised
    assert exited["code"] == "environment_exception"


@pytest.mark.parametrize("text", ["nan", "infinity", "string", "bool", "none", "huge", "list", "nan metric"])
def test_a_reward_that_is_no_finite_number_is_an_error(call, transcript_json, text):
    body = {"items": [transcript_json(text), transcript_json("integer")]}
    status, answer = call("POST", "/v1/environments/rewards/grade", body)
    assert status == 200
    assert (answer["items"][0]["status"], answer["items"][0]["code"]) == ("error", "invalid_reward")
    assert answer["items"][1] == {"status": "ok", "reward": 1.0, "metrics": {}, "correct": True}


def test_a_repeated_request_is_graded_again(call, transcript_json):
    """Which is the same answer from a grader that is a function of its arguments; ``steady`` counts its calls."""
    body = {"items": [transcript_json("abc")]}
    first, again = (call("POST", GRADE, body)[1]["items"][0] for _ in range(2))
    assert (first.pop("metrics"), first) != (again.pop("metrics"), again)
    assert first == again


def test_no_text_breaks_the_answer(call, transcript_json):
    body = {"items": [transcript_json("\x00\U0001f600\u2028")]}
    assert call("POST", GRADE, body)[1]["items"][0]["reward"] == 3.0


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "localhost", "::1"])
def test_other_interfaces_are_refused(host):
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1"):
        serve("unread.yaml", host=host)


def test_app_can_be_tested_without_a_socket():
    client = create_app(Service({}, "secret")).test_client()
    assert client.get("/v1/environments").status_code == 401
    answer = client.get("/v1/environments/x", headers={"Authorization": "Bearer secret"})
    assert answer.get_json()["message"] == "unknown environment 'x'; none exists"
