"""Whatever one request asks for, the engine behind the endpoint goes on: it answers the next one."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import llguidance
import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from megatron_rl.chat import ChatFormat
from megatron_rl.endpoint.calls import Endpoint
from megatron_rl.errors import EngineError
from megatron_rl.inference.engine import EngineOptions
from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.tokenizer import Tokenizer, load_tokenizer
from megatron_rl.types import Request
from tests.support.endpoint import ASK, byte_tokenizer, post
from tests.support.serving import served

EXTREMES = (0, -1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 1e308, float("nan"), True, "1", None)
DRAWN = ("temperature", "top_p", "top_k", "min_p", "seed")
OF_BOTH = (
    *DRAWN, "n", "max_tokens", "prompt_logprobs", "logprobs", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "min_tokens", "logit_bias.65", "stop_token_ids[]", "stop[]", "ignore_eos", "user",
    "stream_options.include_usage", "stream", "return_token_ids", "guided_choice[]", "guided_json.maxLength",
)  # fmt: skip
ROUTES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "/v1/chat/completions": (ASK | {"max_tokens": 2}, (
        *OF_BOTH, "max_completion_tokens", "top_logprobs", "parallel_tool_calls", "chat_template_kwargs.x",
        "messages[].content", "response_format.json_schema.schema.minItems", "tools[].function.parameters.maxItems",
    )),
    "/v1/completions": (
        {"model": "policy", "prompt": "ab", "max_tokens": 2}, (*OF_BOTH, "best_of", "echo", "prompt[]", "prompt[][]")
    ),
    "/v1/responses": ({"model": "policy", "input": "ab", "max_output_tokens": 2}, (
        *DRAWN, "max_output_tokens", "top_logprobs", "max_tool_calls", "stream", "text.format.schema.maxLength",
    )),
    "/v1/messages": ({"model": "policy", "max_tokens": 2, "messages": ASK["messages"]}, (
        *DRAWN, "max_tokens", "stream", "thinking.budget_tokens", "output_config.format.schema.maximum",
    )),
    "/v1/messages/count_tokens": ({"model": "policy", "messages": ASK["messages"]}, (*DRAWN, "max_tokens")),
    "/tokenize": ({"prompt": "a"}, ("prompt", "add_special_tokens", "return_token_strs", "chat_template_kwargs.x")),
    "/detokenize": ({"tokens": [1]}, ("tokens", "tokens[]")),
}  # fmt: skip
BESIDE: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True}, "budget_tokens": {"type": "enabled"}, "content": {"role": "user"},
    "json_schema": {"type": "json_schema"}, "schema": {"type": "json_schema"}, "function": {"type": "function"},
    "parameters": {"name": "f"},
}  # fmt: skip
"""What has to stand beside a field."""


@pytest.fixture(scope="module")
def serving(tokenizer, one_rank) -> Iterator[tuple[Endpoint, RolloutEngine]]:
    with served(tokenizer) as both:
        yield both


def body_with(body: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """``logit_bias.65`` is ``{"logit_bias": {"65": value}}``, ``prompt[][]`` is ``{"prompt": [[value]]}``."""
    for step in reversed(path.replace("[]", ".[]").split(".")):
        value = [value] if step == "[]" else BESIDE.get(step, {}) | {step: value}
    return body | value


@pytest.mark.parametrize("route", ROUTES)
def test_the_extremes_of_every_number(serving, route: str) -> None:
    endpoint, _ = serving
    body, fields = ROUTES[route]
    headers = {"Authorization": f"Bearer {endpoint.token}"}
    with httpx.Client(base_url=endpoint.url, headers=headers, timeout=60) as client:
        assert client.post(route, content=json.dumps(body)).status_code == 200
        for field in fields:
            for value in EXTREMES:
                asked = json.dumps(body_with(body, field, value))
                answer = client.post(route, content=asked)
                assert answer.status_code in (200, 400), (asked, answer.text)
                assert value == value or answer.status_code == 400, asked
        answer = client.post("/v1/chat/completions", content=json.dumps(ASK | {"max_tokens": 2}))
        assert answer.json()["usage"]["completion_tokens"] > 0


def test_a_grammar_is_compiled_once_and_not_by_the_engine(serving, monkeypatch) -> None:
    endpoint, _ = serving
    compiled: list[str] = []

    matcher = llguidance.LLMatcher

    class Counted:
        grammar_from_lark = staticmethod(matcher.grammar_from_lark)

        def __new__(cls, *of: Any, **options: Any) -> Any:
            compiled.append(threading.current_thread().name)
            return matcher(*of, **options)

    monkeypatch.setattr(llguidance, "LLMatcher", Counted)
    for _ in range(2):
        answer = post(endpoint, ASK | {"guided_regex": "[xyz]{3}", "n": 5, "max_tokens": 9}).json()
        assert all(re.fullmatch("[xyz]{3}", choice["message"]["content"]) for choice in answer["choices"])
    (thread,) = compiled
    assert thread.startswith("endpoint-texts")


def test_a_top_k_beyond_the_vocabulary_is_none(serving) -> None:
    endpoint, _ = serving
    answers = [post(endpoint, ASK | {"seed": 1, "max_tokens": 9, "top_k": k}).json() for k in (-1, 257, 2**31 - 1)]
    assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(EngineError("no room"), 400, "invalid_value"), (OverflowError("too large"), 500, "internal_error")],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_the_engine_refuses_fails_alone(serving, monkeypatch, error, status, code, stream) -> None:
    endpoint, engine = serving
    check = EngineOptions.check

    def refuse(self: EngineOptions, request: Request) -> None:
        check(self, request)
        if request.sampling.max_new_tokens == 7:
            raise error

    monkeypatch.setattr(EngineOptions, "check", refuse)
    answer = post(endpoint, ASK | {"max_tokens": 7, "n": 3, "stream": stream})
    assert answer.status_code == (200 if stream else status)
    said = answer.text.rpartition("data: ")[2] if stream else answer.text
    assert (json.loads(said)["error"]["message"], json.loads(said)["error"]["code"]) == (str(error), code)
    assert post(endpoint, ASK | {"max_tokens": 6}).status_code == 200
    assert not engine.has_unfinished


@pytest.fixture(params=[True, False], ids=["special", "ordinary"])
def tagged(request, tmp_path, one_rank) -> Tokenizer:
    """Hermes' tags are tokens, as Qwen's are; those are no special ones, but llguidance takes them for such."""
    byte_tokenizer(tmp_path)
    backend = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    tags = [AddedToken(tag, special=request.param, normalized=False) for tag in ("<tool_call>", "</tool_call>")]
    backend.add_tokens(tags, special_tokens=request.param)
    backend.save_pretrained(str(tmp_path))
    return load_tokenizer(str(tmp_path)).formatting(ChatFormat(tool_call_parser="hermes"))


def test_forced_calls_where_the_tags_are_tokens(tagged: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    with served(tagged) as (endpoint, _):
        for choice in ("required", {"type": "function", "function": {"name": "add"}}):
            asked = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 99}
            (made,) = post(endpoint, ASK | asked).json()["choices"]
            assert made["finish_reason"] == "tool_calls", made
            (call,) = made["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"]) in ({"a": 1}, {"a": 2})


def test_a_grammar_that_allows_no_token_fails_its_request(tagged: Tokenizer) -> None:
    """llguidance forces the tokens of a text, such a token among them, and does not take it for the text then."""
    said = "a<tool_call>b"
    with served(tagged) as (endpoint, engine):
        for shape in ({"choice": [said]}, {"regex": said}, {"json": {"enum": [said]}}):
            for more in ({}, {"stream": True}, {"n": 3}, {"max_tokens": 9, "min_tokens": 9}):
                answer = post(endpoint, ASK | {"max_tokens": 50, "structured_outputs": shape} | more)
                assert answer.status_code == (200 if "stream" in more else 400)
                assert "tokens: its grammar allows no token there" in answer.text
                assert answer.text.count('"invalid_value"') == 1
        answer = post(endpoint, ASK | {"guided_choice": ["yes"], "min_tokens": 40, "max_tokens": 50}).json()
        assert answer["choices"][0]["message"]["content"] == "yes", "where only the end is left, it ends"
        assert not engine.has_unfinished
