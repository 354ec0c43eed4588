"""Requests that are too many, too large, too deep or meant for another server."""

from __future__ import annotations

import http.client
import json
import random
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest

from megatron_rl.environments.graders import PooledGrading
from megatron_rl.environments.serving import MAX_BODY_BYTES, Admission, create_app, strict
from megatron_rl.errors import EnvironmentFault
from megatron_rl.types import GradeResult, Task

GRADE = "/v1/environments/steady/grade"
N = MAX_BODY_BYTES - 16
TOKEN = {"Authorization": "Bearer secret"}


class Counted:
    """Stands in for an environment."""

    name = "steady"
    in_process = True


def client_of(grade: Callable, **options: object):
    """A test client of an application with one environment, and a function that posts to it."""
    client = create_app({"steady": Counted()}, "secret", grade, **options).test_client()

    def post(request_id: str = "r"):
        item = {"task": {"id": "t", "prompt": "?", "data": {}}, "transcript": {"text": "", "finish_reason": "stop"}}
        item["transcript"]["num_tokens"] = 0
        return client.post(GRADE, json={"request_id": request_id, "items": [item]}, headers=TOKEN)

    return client, post


def graded(name: str, environment: object, items: object) -> list[GradeResult]:
    return [GradeResult("ok", 1.0, verdict="correct")]


HOSTILE = {
    "lists": (b"[" + b"[]," * (N // 3 - 1) + b"1]", 400),
    "numbers": (b"[" + b"1.5e9," * (N // 6 - 1) + b"1]", 400),
    "strings": (b"[" + b'"",' * (N // 3 - 1) + b"1]", 400),
    "objects": (b"[" + b'{"a":1},' * (N // 8 - 1) + b"1]", 400),
    "one number": (b"9" * N, 400),
    "brackets": (b"[" * N, 400),
    "quotes": (b'"' * N, 400),
    "a long text": (b'"' + b"x" * N + b'"', 422),
    "escapes": (b'"' + b'\\"' * (N // 2) + b'"', 422),
    "backslashes": (b'"' + b"\\\\" * (N // 2) + b'"', 422),
    "white space": (b" " * N + b"[]", 422),
    "deep": (b"[" * 100_000 + b"]" * 100_000, 400),
    "a little deep": (b"[" * 70 + b"]" * 70, 400),
    "deep objects": (b'{"a":' * 900 + b"1" + b"}" * 900, 400),
    "twice": (b'{"request_id": "a", "request_id": "b", "items": []}', 400),
    "many keys, one twice": (b"{" + b"".join(b'"%d":1,' % i for i in range(50_000)) + b'"49999":1}', 400),
    "surrogate": (b'{"request_id": "\\ud800", "items": []}', 400),
    "surrogate key": (b'{"\\udfff": 1}', 400),
    "not UTF-8": (b'{"request_id": "\xed\xa0\x80", "items": []}', 400),
    "UTF-16": ('{"request_id": "a", "items": []}'.encode("utf-16"), 400),
    "a byte order mark": (b'\xef\xbb\xbf{"request_id": "a", "items": []}', 400),
    "infinite": (b'{"request_id": "a", "items": [-Infinity]}', 400),
    "no id": (b'{"request_id": "", "items": []}', 422),
    "a long id": (b'{"request_id": "' + b"i" * 201 + b'", "items": []}', 422),
    "many items": (b'{"request_id": "a", "items": [' + b"1," * 4096 + b"1]}", 422),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies_are_refused_and_quickly(call, name):
    """The time limit is that of ``call``, ten seconds; the worst takes a fifth of one on an idle machine."""
    body, expected = HOSTILE[name]
    status, answer = call("POST", GRADE, body)
    assert status == expected
    assert 0 < len(answer["message"]) < 3000


def test_values_are_counted_exactly_where_they_may_be_too_many():
    source = random.Random(0)
    words = ['"', "\\", "\\\\", '\\"', ",", "[", "{", "é", "\n", "a" * 50]

    def value(depth: int) -> object:
        if depth == 0:
            return "".join(source.choices(words, k=source.randrange(40)))
        return [value(depth - 1) for _ in range(3)] + [{value(0): 1.5}]

    for _ in range(20):
        data = json.dumps(value(3)).encode()
        without_strings = json.dumps(_hollow(json.loads(data)))
        exact = sum(map(without_strings.count, ',[{"'))
        for chunk in (1, 7, 64, 2**20):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(strict, "_CHUNK", max(chunk, 2))
                assert not strict._more_than(exact, data)
                assert strict._more_than(exact - 1, data)


def _hollow(value: object) -> object:
    """The same structure with empty strings, and the same number of keys."""
    if isinstance(value, list):
        return [_hollow(item) for item in value]
    if isinstance(value, dict):
        return {str(i): _hollow(item) for i, item in enumerate(value.values())}
    return "" if isinstance(value, str) else value


def test_a_body_that_is_not_said_to_be_json_is_refused(call, address):
    headers = {**address.headers, "Content-Type": "text/plain"}
    status, answer = call("POST", GRADE, b"{}", headers)
    assert (status, answer["message"]) == (415, "the content type is 'text/plain'; use application/json")


@pytest.mark.parametrize("request_line", [b"GET /v1/health HTTP/1.1\r\nno colon\r\n\r\n", b"\x16\x03\x01\r\n\r\n"])
def test_what_is_no_http_request_is_answered_in_json_too(address, request_line):
    connection = http.client.HTTPConnection(urlsplit(address.url).netloc, timeout=5)
    connection.connect()
    connection.sock.sendall(request_line)
    text = connection.sock.makefile("rb").read()
    connection.close()
    assert text.startswith(b"HTTP/1.0 400 ")
    assert json.loads(text.partition(b"\r\n\r\n")[2])["message"]


def test_far_too_large_a_body_is_refused_in_json_by_its_header_alone(call):
    status, answer = call("POST", GRADE, b"", {"Content-Length": str(2**30)})
    assert (status, answer["message"][:24]) == (413, "Request Entity Too Large")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1:1", "", "localhost"])
@pytest.mark.parametrize("path", ["/v1/health", "/v1/environments"])
def test_requests_for_another_host_are_refused(call, address, host, path):
    """A page in a browser may have its own name resolve to 127.0.0.1."""
    status, answer = call("GET", path, headers={**address.headers, "Host": host})
    assert status == 403
    assert f"use {urlsplit(address.url).netloc} or localhost:" in answer["message"]


def test_localhost_is_this_host(call, address):
    headers = {**address.headers, "Host": f"LocalHost:{urlsplit(address.url).port}"}
    assert call("GET", "/v1/environments", headers=headers)[0] == 200


def test_who_finds_no_place_is_told_to_come_back():
    release, entered = threading.Event(), threading.Event()

    def grade(name, environment, items):
        entered.set()
        release.wait(10)
        return graded(name, environment, items)

    client, post = client_of(grade, admission=Admission(working=1, waiting=1, patience_s=0.05))
    answers = []
    first = threading.Thread(target=lambda: answers.append(post("first")))
    first.start()
    assert entered.wait(10)
    late = post("second")
    assert (late.status_code, late.headers["Retry-After"]) == (429, "1")
    assert late.get_json()["message"]
    assert client.get("/v1/health").status_code == 200
    counters = client.get("/v1/counters", headers=TOKEN).get_json()["counters"]
    assert (counters["requests"], counters["turned_away"]) == (2, 1)
    release.set()
    first.join(10)
    assert [answer.status_code for answer in answers] == [200]
    assert [post(str(number)).status_code for number in range(5)] == [200] * 5  # every place was given back


def test_refused_requests_keep_no_place():
    client, post = client_of(graded, admission=Admission(working=1, waiting=0, patience_s=0.0))
    for _ in range(3):
        assert client.post(GRADE, data=b"{", content_type="application/json", headers=TOKEN).status_code == 400
        assert client.get("/v1/environments/none", headers=TOKEN).status_code == 404
        assert client.post(GRADE, data=b"{}", content_type="application/json").status_code == 401
        assert client.get(GRADE, headers=TOKEN).status_code == 405
    assert post().status_code == 200


def test_a_pool_that_cannot_work_is_no_sample_s_fault():
    broken = [True]

    def grade(name, environment, items):
        if broken[0]:
            raise EnvironmentFault("no grading worker could be started")
        return graded(name, environment, items)

    _, post = client_of(grade)
    answer = post("same")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert answer.get_json()["message"] == "no grading worker could be started"
    broken[0] = False
    assert post("same").get_json()["items"][0]["reward"] == 1.0  # the failure was not remembered


def test_a_closing_server_grades_nothing():
    admission = Admission()

    def grade(name, environment, items):
        admission.close()
        return [GradeResult("error", code="worker_died", message="the pool was closed")]

    client, post = client_of(grade, admission=admission)
    assert post("during").status_code == 503
    assert post("after").status_code == 503
    assert client.get("/v1/health").status_code == 200


def test_a_hanging_grader_in_process_does_not_take_the_others_with_it(monkeypatch):
    monkeypatch.setattr("megatron_rl.environments.graders.TURN_SECONDS", 0.05)
    release, entered = threading.Event(), threading.Event()

    class Hanging:
        name, in_process = "hanging", True

        def grade(self, task, transcript):
            entered.set()
            release.wait(10)
            return 0.0

    grading = PooledGrading({}, {})
    item = [(Task("t", "?"), None)]
    hung = threading.Thread(target=grading, args=("hanging", Hanging(), item))
    hung.start()
    assert entered.wait(10)
    with pytest.raises(EnvironmentFault, match="in process"):
        grading("hanging", Hanging(), item)
    release.set()
    hung.join(10)


def test_counters_say_what_was_done():
    client, post = client_of(graded, pool_counters=lambda: {"graded": 7})
    post("a")
    post("b")
    assert client.get("/v1/counters").status_code == 401
    answer = client.get("/v1/counters", headers=TOKEN).get_json()
    assert answer["counters"] == {"requests": 2, "turned_away": 0, "graded": 7}
    assert answer["verdicts"] == {"steady": {"correct": 2}}


def test_verdicts_that_an_author_makes_up_do_not_grow_without_bound():
    numbers = iter(range(1000))

    def grade(name, environment, items):
        return [GradeResult("ok", 0.0, verdict=f"verdict {next(numbers)}")]

    client, post = client_of(grade)
    for number in range(50):
        post(str(number))
    verdicts = client.get("/v1/counters", headers=TOKEN).get_json()["verdicts"]["steady"]
    assert (len(verdicts), verdicts["other"]) == (33, 18)
