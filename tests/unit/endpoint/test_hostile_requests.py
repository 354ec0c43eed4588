"""Requests that cost a byte and ask for much, and large ones: whatever is asked, others are heard meanwhile."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from megatron_rl.endpoint.calls import Endpoint
from megatron_rl.endpoint.sessions import Session
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Completion
from tests.support.endpoint import ASK, completion, listening, post, scripted

MIB = 2**20
TEXT = {"model": "policy", "prompt": "a"}


def chat(*contents: str, role: str = "user") -> dict[str, Any]:
    return ASK | {"messages": [{"role": role, "content": content} for content in contents]}


BODIES: dict[str, tuple[str, Callable[[], Any], int]] = {
    "many answers": ("completions", lambda: TEXT | {"prompt": ["a"] * 256, "n": 128}, 400),
    "a long text": ("completions", lambda: TEXT | {"prompt": "a b " * (10 * MIB // 4)}, 400),
    "a long word": ("completions", lambda: TEXT | {"prompt": "a" * 10 * MIB}, 400),
    "long texts": ("completions", lambda: TEXT | {"prompt": ["a b " * (MIB // 80)] * 200}, 400),
    "a long message": ("chat/completions", lambda: chat("a b " * (10 * MIB // 4)), 400),
    "many messages": ("chat/completions", lambda: chat(*["a"] * 40_000), 400),
    "a long answer of an assistant": ("chat/completions", lambda: chat("a" * 10 * MIB, role="assistant"), 400),
    "long stop strings": ("chat/completions", lambda: chat("a") | {"stop": ["a" * MIB] * 10, "stream": True}, 400),
    "empty lists": ("completions", lambda: b"[" + b"[]," * (5 * MIB) + b"[]]", 413),
    "keys": ("completions", lambda: b'{"a":0' + b',"a":0' * 2_600_000 + b"}", 413),
    "a number": ("completions", lambda: b"1" * 15 * MIB, 400),
    "ids": ("completions", lambda: TEXT | {"prompt": [1] * 500_000}, 400),
}


@pytest.mark.parametrize("name", BODIES)
def test_others_are_heard_within_a_second(endpoint: Endpoint, name: str) -> None:
    """In seconds of this process's processors: how long it takes on a busy machine says nothing."""
    path, make, status = BODIES[name]
    body = make()
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, endpoint, content, f"/v1/{path}")
        slowest = 0.0
        while not asked.done():
            began = time.process_time()
            assert httpx.get(f"{endpoint.url}/health", timeout=60).status_code == 200
            slowest = max(slowest, time.process_time() - began)
            time.sleep(0.02)
    assert slowest < 1.0
    assert (asked.result().status_code, asked.result().json()["error"]["type"]) == (status, "invalid_request_error")
    assert len(asked.result().content) < 1000


def test_a_small_body_that_unpacks_to_a_large_one(endpoint: Endpoint) -> None:
    headers = {"Authorization": f"Bearer {endpoint.token}", "Content-Encoding": "gzip"}
    body = gzip.compress(b" " * 64 * MIB, 1)
    began = time.process_time()
    answer = httpx.post(f"{endpoint.url}/v1/completions", content=body, headers=headers)
    assert (answer.status_code, time.process_time() - began < 1.0) == (413, True)


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_nothing_waits_for_a_tokenizer(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    begun, goes_on, encode = threading.Event(), threading.Event(), Tokenizer.encode

    def slow(self: Tokenizer, text: str) -> list[int]:
        begun.set()
        assert goes_on.wait(60)
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    with scripted(tokenizer, lambda call: completion(tokenizer, "x")) as endpoint, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, endpoint, (ASK if path == "chat/completions" else TEXT), f"/v1/{path}")
        try:
            assert begun.wait(60)
            assert httpx.get(f"{endpoint.url}/health", timeout=20).status_code == 200
            assert not asked.done()
        finally:
            goes_on.set()
        assert asked.result().status_code == 200


def test_a_session_that_closes_while_a_call_of_it_is_read(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, encode = threading.Event(), threading.Event(), Tokenizer.encode

    def slow(self: Tokenizer, text: str) -> list[int]:
        begun.set()
        assert goes_on.wait(60)
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    with listening(tokenizer) as endpoint, ThreadPoolExecutor(2) as pool:
        session = endpoint.open_session("")
        asked = pool.submit(post, endpoint, ASK, f"/sessions/{session}/v1/chat/completions")
        try:
            assert begun.wait(60)
            closed = pool.submit(endpoint.close_session, session)
        finally:
            goes_on.set()
        assert asked.result(60).status_code == 410
        assert closed.result(60).calls == ()
        assert endpoint.take() == []


def test_the_choices_of_a_prompt_are_encoded_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded, encode = [], Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: encoded.append(text) or encode(self, text))
    session = Session("", tokenizer)
    first = session.begin_text(range(100), "ab")
    assert [planned.branch for planned in first] == [*range(100)]
    assert session.begin_text([100], "ab")[0].branch == 100
    assert encoded == ["ab", "ab"]
    session.forget(range(101))
    for number in (200, 201):
        session.begin_chat([number], tuple(ASK["messages"]))
        answer = Completion((65, tokenizer.end_token_id), (0.0, 0.0), "stop", 0)
        session.add_answer(number, {"role": "assistant", "content": "x"}, answer)
    encoded.clear()
    history = (*ASK["messages"], {"role": "assistant", "content": "x"}, *ASK["messages"])
    later = session.begin_chat([300, 301, 302], history)
    assert [planned.after for planned in later] == [200, 201, 200], "equal answers keep their own"
    assert [planned.branch for planned in later] == [0, 1, 2]
    assert len(encoded) == 2, "once for each answer that it goes on from"


def test_what_is_refused_by_its_length_alone(endpoint: Endpoint, tokenizer: Tokenizer) -> None:
    """The longest token has 7 characters, and there is room for 200 tokens: 1400 are encoded, 1401 never."""
    for length, why in ((1400, "the prompt has 1400; shorten it"), (1401, "has 1,401 characters, and 200 tokens have")):
        error = post(endpoint, TEXT | {"prompt": "a" * length}, "/v1/completions").json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert why in error["message"]
    assert len(tokenizer.encode("a" * 1401)) == 1401, "the texts of the run itself have no such limit"


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nBad Header: x\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"POST /health HTTP/1.1\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
        b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 5000 + b"\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_malformed_http_is_not_logged(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    """Who has no token cannot fill the log."""
    address = httpx.URL(endpoint.url)
    with socket.create_connection((address.host, address.port), timeout=30) as connection:
        connection.sendall(sent)
        assert connection.recv(100).startswith((b"HTTP/1.0 400", b"HTTP/1.1 40"))
    assert httpx.get(f"{endpoint.url}/health", timeout=60).status_code == 200
    assert not caplog.records
