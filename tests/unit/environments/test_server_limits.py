"""Requests that are too many, too large or too deep."""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest

from megatron_rl.environments.base import Environment
from megatron_rl.environments.server import MAX_BODY_BYTES, create_app
from megatron_rl.environments.service import Service
from megatron_rl.types import Task
from tests.unit.environments.conftest import token_of

GRADE = "/v1/environments/steady/grade"
N = MAX_BODY_BYTES - 16
TOKEN = {"Authorization": "Bearer secret"}


class Counted(Environment):
    """Grades in the server, as ``grade`` says."""

    name = "steady"
    in_process = True

    def __init__(self, grade: Callable[[], object]) -> None:
        self._grade = grade

    def tasks(self, split):
        yield Task("t", "?")

    def grade(self, task, transcript):
        return self._grade()


def client_of(grade: Callable[[], object]):
    """A test client of an application with one environment, and a function that posts to it."""
    client = create_app(Service({"steady": Counted(grade)}, "secret")).test_client()

    def post():
        item = {"task": {"id": "t", "prompt": "?", "data": {}}, "transcript": {"text": "", "finish_reason": "stop"}}
        item["transcript"]["num_tokens"] = 0
        return client.post(GRADE, json={"items": [item]}, headers=TOKEN)

    return client, post


HOSTILE = {
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
    "twice": (b'{"items": [], "items": []}', 400),
    "many keys, one twice": (b"{" + b"".join(b'"%d":1,' % i for i in range(50_000)) + b'"49999":1}', 400),
    "surrogate": (b'{"items": ["\\ud800"]}', 400),
    "surrogate key": (b'{"\\udfff": 1}', 400),
    "not UTF-8": (b'{"items": ["\xed\xa0\x80"]}', 400),
    "UTF-16": ('{"items": []}'.encode("utf-16"), 400),
    "a byte order mark": (b'\xef\xbb\xbf{"items": []}', 400),
    "infinite": (b'{"items": [-Infinity]}', 400),
    "items that are none": (b'{"items": [' + b"1," * 4096 + b"1]}", 422),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies_are_refused_and_quickly(call, name):
    """The time limit is that of ``call``, ten seconds; the worst takes a fifth of one on an idle machine."""
    body, expected = HOSTILE[name]
    status, answer = call("POST", GRADE, body)
    assert status == expected
    assert 0 < len(answer["message"]) < 3000


def test_far_too_large_a_body_is_refused_by_its_header_alone(call):
    status, answer = call("POST", GRADE, b"", {"Content-Length": str(2**30)})
    assert (status, answer["message"][:24]) == (413, "Request Entity Too Large")


def parts(count: int) -> Iterator[bytes]:
    for _ in range(count):
        yield bytes(2**20)


@pytest.mark.parametrize("body", [bytes(40 * 2**20), parts(40)], ids=["whole", "chunked"])
def test_a_client_that_sends_far_too_large_a_body_hears_why(address, body):
    """And not that the connection was reset, which comes of closing it over what was not read."""
    connection = http.client.HTTPConnection(urlsplit(address.url).netloc, timeout=10)
    connection.request("POST", GRADE, body, token_of(address))
    assert connection.getresponse().status == 413
    connection.close()


def test_idle_connections_keep_nobody_from_an_answer(address, call):
    """They need no token; the longest silent makes room, and not the one whose request is on its way."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
    place = urlsplit(address.url)
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection((place.hostname, place.port))) for _ in range(1010)]
        assert call("GET", "/v1/health") == (200, {"status": "ok"})
        idle[-1].sendall(b"GET /v1/health HTTP/1.0\r\n\r\n")
        assert idle[-1].recv(15) == b"HTTP/1.0 200 OK"
        idle[0].settimeout(10)
        assert idle[0].recv(1) == b""


@pytest.fixture
def one_place(monkeypatch):
    monkeypatch.setattr("megatron_rl.environments.service.WORKING", 1)
    monkeypatch.setattr("megatron_rl.environments.server.PATIENCE_SECONDS", 0.05)


@pytest.mark.usefixtures("one_place")
def test_who_finds_no_place_is_told_to_come_back():
    """Else it would wait behind samples that hang, for longer than its client does."""
    release, entered = threading.Event(), threading.Event()

    def grade() -> float:
        entered.set()
        release.wait(10)
        return 1.0

    client, post = client_of(grade)
    answers = []
    first = threading.Thread(target=lambda: answers.append(post()))
    first.start()
    assert entered.wait(10)
    late = post()
    assert late.status_code == 429
    assert late.get_json()["message"]
    assert client.get("/v1/health").status_code == 200
    release.set()
    first.join(10)
    assert [answer.status_code for answer in answers] == [200]
    assert [post().status_code for _ in range(5)] == [200] * 5  # every place was given back


@pytest.mark.usefixtures("one_place")
def test_refused_requests_keep_no_place():
    client, post = client_of(lambda: 1.0)
    for _ in range(3):
        assert client.post(GRADE, data=b"{", content_type="application/json", headers=TOKEN).status_code == 400
        assert client.get("/v1/environments/none", headers=TOKEN).status_code == 404
        assert client.post(GRADE, data=b"{}", content_type="application/json").status_code == 401
        assert client.get(GRADE, headers=TOKEN).status_code == 405
    assert post().status_code == 200


def test_counters_need_the_token_and_name_the_process():
    client, _ = client_of(lambda: 1.0)
    assert client.get("/v1/counters").status_code == 401
    assert client.get("/v1/counters", headers=TOKEN).get_json() == {"pid": os.getpid(), "counters": {}, "beats": 0}
