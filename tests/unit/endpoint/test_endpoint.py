"""The endpoint as clients see it, its answers written here."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from megatron_rl.endpoint.answers import AnswerReader
from megatron_rl.endpoint.calls import Call, Endpoint
from megatron_rl.errors import ConfigError
from megatron_rl.tokenizer import Tokenizer
from tests.support.endpoint import byte_tokenizer, completion, scripted

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ASK = {"model": "policy", "messages": [{"role": "user", "content": "1+2"}]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def endpoint(tokenizer) -> Iterator[Endpoint]:
    """It says what it was asked for, and its choice's number."""
    def answer(call: Call):
        return completion(tokenizer, f"é{tokenizer.decode(call.ids)}{call.branch}")

    with scripted(tokenizer, answer) as endpoint:
        yield endpoint


def client(endpoint: Endpoint, session: str | None = None) -> openai.OpenAI:
    return openai.OpenAI(base_url=endpoint.base_url(session), api_key=endpoint.token, max_retries=0)


def post(endpoint: Endpoint, body: object, path: str = "/v1/chat/completions", token: bytes = b"") -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    authorization = token or f"Bearer {endpoint.token}".encode()
    return httpx.post(endpoint.url + path, content=content, headers={"Authorization": authorization})


# -- answers -----------------------------------------------------------------------------------------


def test_a_chat(endpoint, tokenizer):
    answer = client(endpoint).chat.completions.create(**ASK, n=2, logprobs=True)
    assert [choice.message.content for choice in answer.choices] == ["é1+2=0", "é1+2=1"]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert answer.system_fingerprint == "policy-3"
    written = len(tokenizer.encode("é1+2=0")) + 1
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 2 * written)
    logprobs = answer.choices[0].logprobs.content
    assert [each.logprob for each in logprobs] == [-float(n) for n in range(written)]
    assert (logprobs[2].token, logprobs[2].bytes, logprobs[0].bytes) == ("1", [49], None)
    assert logprobs[-1].token == "<|end|>"


def test_completions(endpoint, tokenizer):
    answer = client(endpoint).completions.create(model="policy", prompt=["a", "b"], n=2, logprobs=0)
    assert [choice.text for choice in answer.choices] == ["éa0", "éa1", "éb0", "éb1"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == 2
    assert answer.choices[0].logprobs.token_logprobs == [0, -1, -2, -3, -4]
    assert answer.choices[0].logprobs.text_offset == [0, 1, 2, 3, 4]
    ids = client(endpoint).completions.create(model="policy", prompt=tokenizer.encode("a"))
    assert ids.choices[0].text == "éa0"


def test_a_stop_string_is_left_out(tokenizer):
    with scripted(tokenizer, lambda call: completion(tokenizer, "3 END", "stop_string")) as endpoint:
        choice = client(endpoint).chat.completions.create(**ASK, stop=["END", "never"]).choices[0]
        first = client(endpoint).chat.completions.create(**ASK, stop=["D", "E"]).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("3 ", "stop")
    assert first.message.content == "3 "


def test_what_a_call_says(tokenizer):
    calls: list[Call] = []

    def answer(call: Call):
        calls.append(call)
        return completion(tokenizer, "x", "length")

    with scripted(tokenizer, answer) as endpoint:
        asked = client(endpoint).chat.completions
        cut = asked.create(**ASK, max_tokens=5, temperature=0, seed=7, stop="!", n=2)
        asked.create(**ASK, temperature=0.5, top_p=0.9, extra_body={"top_k": 4}, stream=True).close()
        session = endpoint.open_session("")
        client(endpoint, session).chat.completions.create(**ASK, temperature=0.1, seed=3, max_tokens=500)
    assert cut.choices[0].finish_reason == "length"
    first, second, streamed, trained = calls
    assert tokenizer.decode(first.ids) == "1+2="
    assert (first.session, first.after, first.max_new_tokens, first.stop, first.seed) == (None, None, 5, ("!",), 7)
    assert (first.sampling.greedy, first.sampling.max_new_tokens, first.sampling.stop) == (True, 5, ("!",))
    assert (first.branch, second.branch) == (0, 1)
    assert not first.wants_progress
    sampling = streamed.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.greedy) == (0.5, 0.9, 4, False)
    assert (streamed.wants_progress, streamed.max_new_tokens) == (True, 100)
    assert (trained.session, trained.sampling, trained.seed, trained.max_new_tokens) == (session, None, None, 100)


# -- streams -----------------------------------------------------------------------------------------


def test_a_stream_holds_back_what_may_be_cut(tokenizer):
    with scripted(tokenizer, lambda call: completion(tokenizer, "aé E EN ENDx", "stop_string")) as endpoint:
        chunks = [*client(endpoint).chat.completions.create(**ASK, stop="END", stream=True, logprobs=True)]
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == "aé E EN "
    assert all(texts[:-1]), "no chunk without news"
    last = chunks[-1].choices[0]
    assert last.finish_reason == "stop"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
    assert len(last.logprobs.content) == len(tokenizer.encode("aé E EN ENDx"))


def test_what_of_a_stream_is_certain(tokenizer):
    reader, ids = AnswerReader(tokenizer, ("END", "ND!")), tokenizer.encode("aé E EN ENDx")
    shown = [reader.so_far(ids[:count]) for count in range(1, len(ids) + 1)]
    assert shown == ["a", "a", "aé", "aé ", "aé ", "aé E ", "aé E ", "aé E ", "aé E EN ", *["aé E EN "] * 4]


def test_a_stream_of_several_choices(endpoint):
    texts: dict[int, str] = {0: "", 1: ""}
    stream = client(endpoint).completions.create(
        model="policy", prompt="ab", n=2, stream=True, stream_options={"include_usage": True}
    )
    *chunks, usage = stream
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "éab0", 1: "éab1"}
    assert sum(chunk.choices[0].finish_reason == "stop" for chunk in chunks) == 2
    assert (usage.choices, usage.usage.prompt_tokens, usage.usage.completion_tokens) == ([], 2, 12)


def test_an_answer_that_nobody_showed_before_its_end(tokenizer):
    answer = completion(tokenizer, "three")
    with scripted(tokenizer, lambda call: answer, token_by_token=False) as endpoint:
        chunks = [*client(endpoint).chat.completions.create(**ASK, stream=True)]
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "three"]


def test_asynchronous_clients_are_answered_together(tokenizer):
    """Sixteen wait before the first has its answer."""
    waiting = threading.Barrier(2)
    calls: list[Call] = []

    def answer(call: Call):
        calls.append(call)
        if len(calls) == 1:
            waiting.wait(30)  # until all have been asked
        return completion(tokenizer, str(call.number))

    async def ask_all(endpoint: Endpoint) -> list[str]:
        asked = openai.AsyncOpenAI(base_url=endpoint.base_url(), api_key=endpoint.token)
        answers = [asyncio.create_task(asked.chat.completions.create(**ASK)) for _ in range(16)]
        while len(endpoint._desk._waiting) < 16:
            await asyncio.sleep(0.01)
        waiting.wait(30)
        return [(await answer).choices[0].message.content for answer in answers]

    with scripted(tokenizer, answer) as endpoint:
        assert sorted(asyncio.run(ask_all(endpoint)), key=int) == [str(n) for n in range(16)]


# -- sessions ----------------------------------------------------------------------------------------


def test_a_session_goes_on_from_its_own_tokens(tokenizer):
    calls: list[Call] = []

    def answer(call: Call):
        calls.append(call)
        return completion(tokenizer, f"said {call.number}")

    with scripted(tokenizer, answer) as endpoint:
        session = endpoint.open_session("")
        asked, messages = client(endpoint, session).chat.completions, [*ASK["messages"]]
        first = asked.create(model="policy", messages=messages)
        messages += [first.choices[0].message, {"role": "user", "content": "more"}]
        second = asked.create(model="policy", messages=messages)
        again = asked.create(model="policy", messages=messages)
        end = endpoint.close_session(session)
        with pytest.raises(openai.APIStatusError) as over:
            asked.create(model="policy", messages=messages)
    assert [call.after for call in calls] == [None, calls[0].number, calls[0].number]
    assert [call.branch for call in calls] == [0, 0, 1]
    assert tokenizer.decode(calls[1].ids) == "more="
    assert second.usage.prompt_tokens == again.usage.prompt_tokens == len("1+2=said 0") + 1 + len("more=")
    assert (end.calls, end.edited) == (tuple(call.number for call in calls), 0)
    assert (over.value.status_code, over.value.code) == (410, "session_over")


def test_a_call_that_waits_when_its_session_closes(tokenizer):
    endpoint = Endpoint(tokenizer, max_sequence_length=200, max_new_tokens=100)
    endpoint.start()
    try:
        session, other = endpoint.open_session(""), endpoint.open_session("")
        with ThreadPoolExecutor(2) as pool:
            late, stays = (
                pool.submit(post, endpoint, ASK, f"/sessions/{each}/v1/chat/completions") for each in (session, other)
            )
            calls: list[Call] = []
            while len(calls) < 2:
                endpoint.wait_blocking(1.0)
                calls += endpoint.take()
            assert endpoint.close_session(session).calls == ()
            assert late.result(30).status_code == 410
            for call in calls:
                endpoint.deliver(call.number, completion(tokenizer, "3"))
            assert stays.result(30).status_code == 200
            assert len(endpoint.close_session(other).calls) == 1
    finally:
        endpoint.close()


# -- tools -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hermes(tmp_path_factory) -> Tokenizer:
    """With a template that shows tools in the words by which its parser is found."""
    shown = "{% if tools %}<tool_call> arguments {{ tools[0]['function']['name'] }};{% endif %}"
    told = "{{ m['content'] }}{% for c in m.get('tool_calls') or [] %}@{{ c['function']['name'] }}{% endfor %}|"
    template = shown + "{% for m in messages %}" + told + "{% endfor %}"
    return byte_tokenizer(tmp_path_factory.mktemp("hermes"), template)


CALLED = 'I add <these.\n<tool_call>{"name": "add", "arguments": {"a": "é"}}</tool_call>'


def test_calls_of_tools(hermes):
    answers = [completion(hermes, CALLED), completion(hermes, "Done: 3 < 4"), completion(hermes, CALLED, "length")]
    calls: list[Call] = []

    def answer(call: Call):
        calls.append(call)
        return answers[len(calls) - 1]

    with scripted(hermes, answer) as endpoint:
        asked, messages = client(endpoint, endpoint.open_session("")).chat.completions, [*ASK["messages"]]
        first = asked.create(model="policy", messages=messages, tools=[ADD]).choices[0]
        called = first.message.tool_calls[0]
        result = {"role": "tool", "tool_call_id": called.id, "content": "3"}
        messages += [first.message, result]
        second = asked.create(model="policy", messages=messages, tools=[ADD]).choices[0]
        text = asked.create(model="policy", messages=messages, tools=[ADD], tool_choice="none").choices[0]
    assert (first.finish_reason, first.message.content) == ("tool_calls", "I add <these.")
    assert (called.id, called.function.name, called.function.arguments) == ("call_1_0", "add", '{"a": "\\u00e9"}')
    assert (second.finish_reason, second.message.content) == ("stop", "Done: 3 < 4")
    assert second.message.tool_calls is None
    assert (text.finish_reason, text.message.content, text.message.tool_calls) == ("length", CALLED, None)
    assert hermes.decode(calls[0].ids) == "<tool_call> arguments add;1+2|"
    assert calls[1].after == calls[0].number
    assert hermes.decode(calls[1].ids) == "|3|"


def test_a_thought_is_shown_as_it_comes(hermes):
    reader = AnswerReader(hermes, (), "hermes", (ADD,))
    assert reader.so_far(hermes.encode("<think>is a < {b}")) == "<think>is a < {b}"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (CALLED, "I add "),
        ("<think>is a < b? {</think> Yes. <tool_call>", "<think>is a < b? {</think> Yes. "),
        ("One. Two. {3}", "One. Two. "),
        (" spaced", ""),
        ("", ""),
    ],
)
def test_a_stream_holds_back_what_may_be_a_call(hermes, said, shown):
    with scripted(hermes, lambda call: completion(hermes, said)) as endpoint:
        chunks = [*client(endpoint).chat.completions.create(**ASK, tools=[ADD], stream=True)]
        whole = client(endpoint).chat.completions.create(**ASK, tools=[ADD]).choices[0].message
    *before, last = [chunk.choices[0].delta for chunk in chunks]
    streamed = "".join(delta.content or "" for delta in before)
    assert streamed == shown.rstrip()
    assert streamed + (last.content or "") == (whole.content or "")
    assert [call.model_dump() | {"index": 0} for call in whole.tool_calls or ()] == [
        call.model_dump() for call in last.tool_calls or ()
    ]


def test_a_template_that_shows_no_tools(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, "{{ messages[0]['content'] }}{# <tool_call> arguments #}")
    with scripted(tokenizer, lambda call: completion(tokenizer, "")) as endpoint:
        with pytest.raises(openai.BadRequestError, match="does not show them"):
            client(endpoint).chat.completions.create(**ASK, tools=[ADD])


# -- refusals ----------------------------------------------------------------------------------------


def test_who_may_ask(endpoint):
    assert httpx.get(f"{endpoint.url}/health").json() == {"status": "ok"}
    for given in (b"Basic", b"Bearer", b"Bearer wrong", f"Basic {endpoint.token}".encode(), b"Bearer \xe9"):
        answer = post(endpoint, ASK, token=given)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{endpoint.url}/v1/models").status_code == 401


def test_models(endpoint):
    asked = client(endpoint)
    assert [model.id for model in asked.models.list()] == ["policy"]
    assert asked.models.retrieve("policy").id == "policy"
    with pytest.raises(openai.NotFoundError, match="the one here is 'policy'"):
        asked.models.retrieve("gpt")
    with pytest.raises(openai.NotFoundError, match="the one here is 'policy'"):
        asked.chat.completions.create(**ASK | {"model": "gpt"})


@pytest.mark.parametrize(
    ("body", "status", "code", "why"),
    [
        (b"{", 400, "invalid_json", "not JSON"),
        (b"\xff", 400, "invalid_json", "not JSON"),
        (b'{"temperature": NaN}', 400, "invalid_json", "NaN is not JSON"),
        (b'{"n": 1, "n": 2}', 400, "invalid_json", "occurs twice"),
        (b"[" * 100_000, 400, "invalid_json", "nested"),
        (b'{"model": "\\ud800"}', 400, "invalid_json", "lone surrogate"),
        (b"[]", 400, "invalid_type", "a JSON object"),
        (b" " * (16 * 2**20 + 1), 413, "too_large", "16 MiB"),
        (ASK | {"n": 0}, 400, "invalid_value", "'n' is 0"),
        (ASK | {"messages": [{"role": "user", "content": "x" * 199}]}, 400, "context_length_exceeded", "has 200"),
        (ASK | {"tools": [{}]}, 400, "invalid_tools", "tool 0"),
        (ASK | {"tools": [ADD]}, 400, "invalid_value", "--rl-tool-call-parser"),
    ],
)
def test_requests_that_are_refused(endpoint, body, status, code, why):
    answer = post(endpoint, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert why in error["message"]
    assert client(endpoint).chat.completions.create(**ASK).choices[0].message.content == "é1+2=0", "the rest goes on"


def test_paths_and_methods(endpoint):
    assert post(endpoint, ASK, "/v1/embeddings").json()["error"]["code"] == "not_found"
    answer = httpx.get(f"{endpoint.url}/v1/completions", headers={"Authorization": f"Bearer {endpoint.token}"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (405, "GET is not for /v1/completions; POST is")


def test_a_template_that_refuses(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, "{{ raise_exception('no system messages here') }}")
    with scripted(tokenizer, lambda call: completion(tokenizer, "")) as endpoint:
        for session in (None, endpoint.open_session("")):
            with pytest.raises(openai.BadRequestError, match="no system messages here"):
                client(endpoint, session).chat.completions.create(**ASK)


def test_an_empty_prompt_and_what_came_with_it(endpoint):
    session = endpoint.open_session("")
    for base in (None, session):
        with pytest.raises(openai.BadRequestError, match="is empty"):
            client(endpoint, base).completions.create(model="policy", prompt=["a", ""])
    answer = client(endpoint, session).completions.create(model="policy", prompt="a")
    assert answer.choices[0].text == "éa0", "of a refused request nothing is kept: this is the first branch"
    assert len(endpoint.close_session(session).calls) == 1


def test_little_room(tokenizer):
    calls: list[Call] = []

    def answer(call: Call):
        calls.append(call)
        return completion(tokenizer, "x")

    with scripted(tokenizer, answer) as endpoint:
        client(endpoint).completions.create(model="policy", prompt="a" * 196, max_tokens=50)
    assert [call.max_new_tokens for call in calls] == [4]


# -- its end -----------------------------------------------------------------------------------------


def test_calls_that_wait_are_told_when_no_answer_can_come(tokenizer):
    endpoint = Endpoint(tokenizer, max_sequence_length=200, max_new_tokens=100)
    endpoint.start()
    with ThreadPoolExecutor(3) as pool:
        plain = pool.submit(post, endpoint, ASK | {"n": 2})
        streamed = pool.submit(lambda: [*client(endpoint).chat.completions.create(**ASK, stream=True)])
        _await(lambda: len(endpoint._desk._waiting) == 3)
        endpoint.abort("the rollout is over")
        assert (plain.result(30).status_code, plain.result().json()["error"]["message"]) == (503, "the rollout is over")
        with pytest.raises(openai.APIError, match="the rollout is over"):
            streamed.result(30)
        assert endpoint.take() == []
        session = endpoint.open_session("")
        path = f"/sessions/{session}/v1/chat/completions"
        for _ in range(2):
            again = pool.submit(post, endpoint, ASK, path)
            endpoint.wait_blocking(60.0)
            (call,) = endpoint.take()
            assert call.branch == 0, "a call without an answer counts for nothing"
            endpoint.abort("not now")
            assert again.result(30).status_code == 503
        assert endpoint.close_session(session).calls == ()
        late = pool.submit(post, endpoint, ASK)
        _await(lambda: len(endpoint._desk._waiting) == 1)
        endpoint.close()
        assert late.result(30).status_code == 503
    endpoint.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{endpoint.url}/health")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up(tokenizer, caplog, stream):
    endpoint = Endpoint(tokenizer, max_sequence_length=200, max_new_tokens=100)
    endpoint.start()
    session = endpoint.open_session("")
    connection = http.client.HTTPConnection(endpoint.url.removeprefix("http://"))
    body, headers = json.dumps(ASK | {"stream": stream}), {"Authorization": f"Bearer {endpoint.token}"}
    connection.request("POST", f"/sessions/{session}/v1/chat/completions", body, headers)
    endpoint.wait_blocking(60.0)
    (call,) = endpoint.take()
    connection.close()
    time.sleep(0.1)
    endpoint.progress(call.number, [70, 71])
    endpoint.deliver(call.number, completion(tokenizer, "3"))
    assert endpoint.close_session(session).calls == (call.number,)
    endpoint.close()
    assert caplog.records == []


def test_an_address_that_is_taken(endpoint, tokenizer):
    port = int(endpoint.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
        Endpoint(tokenizer, max_sequence_length=9, max_new_tokens=9, port=port).start()


def test_waiting_wakes_at_a_call(tokenizer):
    endpoint = Endpoint(tokenizer, max_sequence_length=200, max_new_tokens=100)
    endpoint.start()

    async def wait() -> float:
        began = time.monotonic()
        await endpoint.wait(0.01)  # nobody asks
        assert endpoint.take() == []
        await endpoint.wait(30.0)
        return time.monotonic() - began

    with ThreadPoolExecutor(2) as pool:
        waited = pool.submit(asyncio.run, wait())
        time.sleep(0.2)
        answer = pool.submit(post, endpoint, ASK)
        assert 0.1 < waited.result(60) < 25
        asyncio.run(endpoint.wait(30.0))  # it is there already
        (call,) = endpoint.take()
        endpoint.deliver(call.number, completion(tokenizer, "3"))
        assert answer.result(30).status_code == 200
    endpoint.close()


def test_a_thread_that_waits_wakes_at_a_call(tokenizer):
    endpoint = Endpoint(tokenizer, max_sequence_length=200, max_new_tokens=100)
    endpoint.start()
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        waited = pool.submit(endpoint.wait_blocking, 60.0)
        time.sleep(0.2)
        answer = pool.submit(post, endpoint, ASK)
        waited.result(50)
        assert time.monotonic() - began < 45
        endpoint.close()
        assert answer.result(30).status_code == 503


def _await(holds) -> None:
    until = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.005)
