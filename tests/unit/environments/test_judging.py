"""Judges: what a scripted server says, and what becomes of it."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megatron_rl.environments import judging
from megatron_rl.environments.judging import Judge, JudgeError, JudgeSettings

KEY = "key-of-the-judge"


def said(content):
    return 200, {}, json.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": content}}]})


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body | {"key": self.headers.get("Authorization"), "path": self.path})
        replies, number = self.server.replies, len(self.server.asked) - 1
        reply = replies[min(number, len(replies) - 1)]
        if reply == "hang":
            self.server.released.wait(30)
            return
        status, headers, text = reply
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        """Says nothing."""


@pytest.fixture
def server(monkeypatch):
    """Answers with ``replies``, the last of them again and again; ``asked`` has the requests."""
    monkeypatch.setattr(judging, "FIRST_PAUSE", 0.01)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.released = threading.Event()
    server.asked, server.replies = [], [said("7")]
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()


def judge(server, **settings):
    return Judge(JudgeSettings(url=server.url, **settings))


def test_a_verdict_is_a_share_of_the_range(server):
    assert judge(server).verdict("2+2?", "4", "four") == pytest.approx(0.7)
    assert judge(server, lowest=5, highest=9).verdict("2+2?", "4") == pytest.approx(0.5)
    [asked, _] = server.asked
    assert asked["path"] == "/v1/chat/completions"
    assert asked["key"] is None
    [message] = asked["messages"]
    assert message["role"] == "user"
    assert "2+2?" in message["content"]
    assert "four" in message["content"]


def test_what_is_asked_arrives_as_it_is(server):
    text = 'größe 数 😀 {question} {"a": 1} \\ \u2028'
    judge(server, prompt="Q {question} A {answer} {other}").verdict("é", text)
    assert server.asked[0]["messages"][0]["content"] == f"Q é A {text} {{other}}"


def test_errors_that_pass_are_asked_again(server):
    server.replies = [(500, {}, "broken"), (503, {}, ""), (429, {"Retry-After": "0.01"}, "slow down"), said("10")]
    assert judge(server).verdict("q", "a") == 1.0
    assert len(server.asked) == 4


def test_a_server_that_stays_broken_is_given_up(server):
    server.replies = [(500, {}, "broken")]
    with pytest.raises(JudgeError, match="no verdict in 3 tries.*status 500: broken"):
        judge(server, attempts=3).verdict("q", "a")
    assert len(server.asked) == 3


def test_a_retry_after_beyond_the_deadline_is_not_waited_for(server):
    server.replies = [(429, {"Retry-After": "1000"}, "slow down")]
    with pytest.raises(JudgeError, match="no verdict in 1 tries.*status 429"):
        judge(server).verdict("q", "a")
    assert len(server.asked) == 1


@pytest.mark.parametrize("when", ["Wed, 21 Oct 2026 07:28:00 GMT", "-5", "nan", ""])
def test_a_retry_after_that_is_no_number_is_a_pause_of_ours(server, when):
    server.replies = [(429, {"Retry-After": when}, ""), said("3")]
    assert judge(server).verdict("q", "a") == pytest.approx(0.3)


def test_a_judge_that_hangs_has_a_deadline(server):
    server.replies = ["hang"]
    with pytest.raises(JudgeError, match="no verdict in 1 tries, 0.5 s at most; the last: ReadTimeout"):
        judge(server, deadline=0.5).verdict("q", "a")


def test_nobody_listens():
    with pytest.raises(JudgeError, match="no verdict in 1 tries.*ConnectError"):
        Judge(JudgeSettings(url="http://127.0.0.1:9/v1", attempts=1)).verdict("q", "a")


def test_the_key_comes_from_its_variable_and_stays_out_of_messages(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server.replies = [said("1"), (401, {}, f"no such key: {KEY}")]
    asking = judge(server, key_variable="JUDGE_KEY")
    asking.verdict("q", "a")
    assert server.asked[0]["key"] == f"Bearer {KEY}"
    with pytest.raises(JudgeError, match=r"the judge refused with status 401: no such key: \[key\]"):
        asking.verdict("q", "a")
    assert len(server.asked) == 2, "a refusal is not asked again"
    assert KEY not in repr(JudgeSettings(url="http://h/v1", key_variable="JUDGE_KEY"))


@pytest.mark.parametrize(
    ("kind", "answer", "reward"),
    [
        ("number", "I say 3, no: 8.", 0.8),
        ("number", "-0", 0.0),
        ("json:score", 'Sure! {"why": "ok", "score": 9}', 0.9),
        ("json:score", '{"score": "6"}', 0.6),
        (r"\[\[(\d+)\]\]", "good [[4]] and [[5]]", 0.4),
    ],
)
def test_ways_to_read_a_verdict(server, kind, answer, reward):
    server.replies = [said(answer)]
    assert judge(server, verdict=kind).verdict("q", "a") == pytest.approx(reward)


@pytest.mark.parametrize(
    ("kind", "answer", "problem"),
    [
        ("number", "excellent", "no verdict to read"),
        ("number", None, "no verdict to read"),
        ("number", "11", "is 11, outside 0 to 10"),
        ("number", "-1", "is -1, outside"),
        ("number", "9" * 400, "is inf, outside"),
        (r"(\S+)$", "nan", "is nan, outside"),
        (r"(\S+)$", "inf", "is inf, outside"),
        (r"(\S+)$", "٣x", "no verdict to read"),
        ("json:score", '{"score": NaN}', "no verdict to read"),
        ("json:score", f'{{"score": {"9" * 400}}}', "no verdict to read"),
        ("json:score", '{"score": [1]}', "no verdict to read"),
        ("json:score", '{"grade": 1}', "no verdict to read"),
        ("json:score", "}{", "no verdict to read"),
        (r"\[\[(\d+)\]\]", "4", "no verdict to read"),
    ],
)
def test_nonsense_is_a_failure_and_the_next_verdict_counts(server, kind, answer, problem):
    server.replies = [said(answer), said("[[5]] {\"score\": 5} 5")]
    asking = judge(server, verdict=kind)
    with pytest.raises(JudgeError, match=problem):
        asking.verdict("q", "a")
    assert asking.verdict("q", "a") == pytest.approx(0.5)


@pytest.mark.parametrize("body", ["<html>", "[]", "{}", '{"choices": []}', '{"choices": [{"message": {}}]}', "\udcff"])
def test_what_is_no_completion_is_asked_again(server, body):
    server.replies = [(200, {}, body.encode(errors="replace").decode()), said("2")]
    assert judge(server).verdict("q", "a") == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"urll": "http://a/v1"}, "has no key 'urll'; did you mean 'url'?"),
        ({"url": "host/v1"}, "give http"),
        ({"url": "reference"}, "url is 'reference'; give http.* or policy"),
        ({"url": "policy", "deadline": 5.0}, "deadline is for judges at a URL, and url is policy"),
        ({"url": 3}, "must be of type str"),
        ({"attempts": True}, "must be of type int"),
        ({"url": "http://a/v1", "attempts": 0}, "attempts is 0; it must be at least 1"),
        ({"url": "http://a/v1", "prompt": "Grade this"}, "does not show the {answer}"),
        ({"url": "http://a/v1", "verdict": "("}, "no regular expression"),
        ({"url": "http://a/v1", "verdict": "score"}, "a regular expression with a group"),
        ({"url": "http://a/v1", "lowest": 10}, "must be the smaller"),
        ({"url": "http://a/v1", "deadline": 0}, "deadline is 0"),
        ({"url": "http://a/v1", "key_variable": "NO_SUCH_VARIABLE_AT_ALL"}, "NO_SUCH_VARIABLE_AT_ALL.*is not set"),
        ({"model": "large"}, "model is for judges at a URL"),
    ],
)
def test_settings_that_make_no_sense_are_one_line(given, problem):
    with pytest.raises(ValueError, match=problem) as refused:
        JudgeSettings.of(given)
    assert "\n" not in str(refused.value)
