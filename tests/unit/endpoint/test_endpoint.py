"""The endpoint as clients see it, its answers written here."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace

import httpx
import openai
import pytest

from megatron_rl.endpoint.calls import Call, Endpoint, outside_sessions, request_of
from tests.support.endpoint import ADD, ASK, byte_tokenizer, client, completion, post, scripted

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
    assert (logprobs[2].token, logprobs[2].bytes, logprobs[0].bytes) == ("1", [49], [0xC3])
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


def test_usage_has_what_the_cache_had_of_each_prompt(tokenizer):
    """Of a prompt's choices the first one's: the others find what it has computed."""
    def answer(call: Call):
        return replace(completion(tokenizer, "x"), cached_tokens=len(call.ids) - 1 + 50 * call.branch)

    asked = {"model": "policy", "prompt": ["abc", "de"], "n": 2}
    with scripted(tokenizer, answer) as endpoint:
        usage = client(endpoint).completions.create(**asked).usage
        *_, last = client(endpoint).completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (5, 3)
    assert last.usage == usage


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
        assert [*asked.create(**ASK, temperature=0.5, top_p=0.9, extra_body={"top_k": 4}, stream=True)]
        session = endpoint.open_session("")
        client(endpoint, session).chat.completions.create(**ASK, temperature=0.1, seed=3, max_tokens=500)
    assert cut.choices[0].finish_reason == "length"
    first, second, streamed, trained = calls
    assert tokenizer.decode(first.ids) == "1+2="
    assert (first.session, first.after, first.max_new_tokens, first.stop, first.seed) == (None, None, 5, ("!",), 7)
    assert (first.sampling.greedy, first.sampling.max_new_tokens, first.sampling.stop) == (True, 5, ("!",))
    assert (first.branch, second.branch) == (0, 1)
    assert [call.hints["streams"] for call in (first, streamed)] == [False, True]
    assert request_of(**json.loads(json.dumps(outside_sessions(streamed, "")))).hints.streams
    sampling = streamed.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.greedy) == (0.5, 0.9, 4, False)
    assert streamed.max_new_tokens == 100
    assert (trained.session, trained.sampling, trained.seed, trained.max_new_tokens) == (session, None, None, 100)


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
        while endpoint.num_waiting < 16:
            await asyncio.sleep(0.01)
        waiting.wait(30)
        return [(await answer).choices[0].message.content for answer in answers]

    with scripted(tokenizer, answer) as endpoint:
        assert sorted(asyncio.run(ask_all(endpoint)), key=int) == [str(n) for n in range(16)]


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


# -- refusals ----------------------------------------------------------------------------------------


def test_a_template_that_shows_no_tools(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, "{{ messages[0]['content'] }}{# <tool_call> arguments #}")
    with scripted(tokenizer, lambda call: completion(tokenizer, "")) as endpoint:
        with pytest.raises(openai.BadRequestError, match="does not show them"):
            client(endpoint).chat.completions.create(**ASK, tools=[ADD])


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
    with pytest.raises(openai.NotFoundError, match="here is 'policy'"):
        asked.models.retrieve("gpt")
    with pytest.raises(openai.NotFoundError, match="here is 'policy'"):
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
