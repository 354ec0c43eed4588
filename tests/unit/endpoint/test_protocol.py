"""Requests in OpenAI's format: what is read, and how everything else is refused."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_rl.endpoint.fields import ApiError
from megatron_rl.endpoint.options import Drawing, Options
from megatron_rl.endpoint.protocol import ChatRequest, TextRequest, read_chat, read_text
from megatron_rl.types import Constraints

USER = {"role": "user", "content": "hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def chat(**fields: Any) -> ChatRequest:
    return read_chat({"model": "policy", "messages": [USER], **fields}, vocab_size=100)


def text(**fields: Any) -> TextRequest:
    return read_text({"model": "policy", "prompt": "hi", **fields}, vocab_size=100)


def test_all_that_a_chat_may_ask_for():
    request = chat(
        max_tokens=9, max_completion_tokens=7, temperature=0, top_p=0.5, top_k=-1, n=3, seed=-4, stop=["a", "b", "a"],
        stream=True, stream_options={"include_usage": True}, logprobs=True, top_logprobs=5, tools=[TOOL],
        tool_choice="auto",
        min_p=0.1, stop_token_ids=[7, 7], min_tokens=2, logit_bias={"3": -100, "4": 0}, presence_penalty=1,
        frequency_penalty=-0.5, ignore_eos=True, repetition_penalty=1.2,
    )  # fmt: skip
    constraints = Constraints("", ((3, -100.0),), 1.0, -0.5, 2, True, 1.2)
    drawing = Drawing(7, 0.0, 0.5, 0, 0.1, ("a", "b"), (7,), constraints, "logit_bias")
    assert request.options == Options(3, -4, True, True, True, 5, None, None, drawing)
    assert (request.tools, request.reads_calls) == ((TOOL,), True)
    assert not chat(tools=[TOOL], tool_choice="none").reads_calls
    assert chat() == chat(
        n=None, seed=None, stop=None, logit_bias={}, presence_penalty=0, user="me", store=False, top_logprobs=0,
        repetition_penalty=1, response_format={"type": "text"}, max_tokens=None, tools=[], tool_choice="auto",
    )  # fmt: skip


def test_messages_come_in_one_form():
    parts = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "3?"}]
    echoed = {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "audio": None, "made_up": 1}
    result = {"role": "tool", "tool_call_id": "a", "content": "5"}
    request = chat(messages=[{"role": "developer", "content": "Be brief."}, USER | {"content": parts}, echoed, result])
    assert request.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        result,
    )


def test_prompts():
    assert text().prompts == ("hi",)
    assert text(prompt=[1, 2]).prompts == ((1, 2),)
    assert text(prompt=["a", "b"]).prompts == ("a", "b")
    assert text(prompt=[[1], [2, 3]]).prompts == ((1,), (2, 3))
    assert text(logprobs=0).options.logprobs
    asked = text(logprobs=2, echo=True)
    assert (asked.echo, asked.options.top_logprobs, asked.options.prompt_logprobs) == (True, 2, 2)
    assert text(echo=True).options == Options()
    assert text(prompt_logprobs=0).options.prompt_logprobs == 0
    assert not text(best_of=1).options.logprobs


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"messages": None}, "messages", "is missing"),
        ({"messages": []}, "messages", "is empty"),
        ({"messages": "hi"}, "messages", "is 'hi'; give a list"),
        ({"messages": ["hi"]}, "messages[0]", "is 'hi'; give an object"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role", "is missing"),
        ({"messages": [USER, {"role": "bot", "content": "hi"}]}, "messages[1].role", "'bot'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "is 3"),
        ({"messages": [USER | {"content": [{"type": "image_url"}]}]}, "messages[0].content[0].type", "only texts"),
        ({"messages": [USER | {"tool_calls": [CALL]}]}, "messages[0].tool_calls", "are of the assistant"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function", "missing"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].tool_call_id", "is missing"),
        ({"model": None}, "model", "is missing"),
        ({"chat_template_kwargs": ["a"]}, "chat_template_kwargs", "give an object"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "has 'tokenize', which is not for"),
        ({"chat_template_kwargs": dict.fromkeys(map(str, range(65)))}, "chat_template_kwargs", "at most 64"),
        ({"n": 0}, "n", "from 1 to 128"),
        ({"n": 1.0}, "n", "a whole number"),
        ({"n": True}, "n", "a whole number"),
        ({"max_tokens": 0}, "max_tokens", "from 1 to 2147483647"),
        ({"temperature": -1}, "temperature", "is -1.0"),
        ({"temperature": 1e-9}, "temperature", "is 1e-09"),
        ({"temperature": float("1e999")}, "temperature", "is inf"),
        ({"temperature": 10**400}, "temperature", "give a number"),
        ({"temperature": True}, "temperature", "a number"),
        ({"temperature": "hot"}, "temperature", "a number"),
        ({"top_p": 0}, "top_p", "leaves no token"),
        ({"top_p": 1.1}, "top_p", "from 0 to 1"),
        ({"seed": 2**63}, "seed", "from"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": [""]}, "stop[0]", "is empty"),
        ({"stop": [3]}, "stop[0]", "give a text"),
        ({"stop": ["a", "a" * 257]}, "stop[1]", "at most 256"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"top_logprobs": 2}, "top_logprobs", "'logprobs' is not true"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "from 0 to 20"),
        ({"prompt_logprobs": 1, "stream": True}, "stream", "leave out"),
        ({"logprobs": 1}, "logprobs", "true or false"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "give text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format", "one of them"),
        ({"guided_regex": ""}, "guided_regex", "1 to 16,384"),
        ({"structured_outputs": {"regex": "a" * 16_385}}, "regex", "has 16,385 characters"),
        ({"guided_json": "{"}, "guided_json", "is no JSON"),
        ({"guided_json": "[]"}, "guided_json", "give an object"),
        ({"guided_choice": []}, "guided_choice", "has 0 texts"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]", "give a text"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar", "not supported"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "give token ids"),
        ({"logit_bias": {"100": 1}}, "logit_bias", "from 0 to 99"),
        ({"logit_bias": {"3": 101}}, "logit_bias.3", "from -100 to 100"),
        ({"presence_penalty": 2.1}, "presence_penalty", "from -2 to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "from -2 to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "from 0.01 to 100"),
        ({"min_p": 2}, "min_p", "from 0 to 1"),
        ({"min_tokens": -1}, "min_tokens", "from 0 to 2147483647"),
        ({"stop_token_ids": [100]}, "stop_token_ids", "from 0 to 99"),
        ({"stop_token_ids": [5, None, -7]}, "stop_token_ids", "has None"),
        ({"top_k": 2**31}, "top_k", "from -1 to 2147483647"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "leave it out"),
        ({"functions": [{}]}, "functions", "not supported"),
        ({"made_up": 1}, "made_up", "no field that is known"),
        ({"tools": [{"type": "function"}]}, "tools", "tool 0"),
        ({"tools": [TOOL, TOOL]}, "tools", "names must be unique"),
        ({"tools": {"f": TOOL}}, "tools", "give a list"),
        ({"tool_choice": "required"}, "tool_choice", "no 'tools' to call"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "'required' or a function"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function", "is missing"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "g"}}}, "tool_choice.function.name", "none of 'tools'"),
        ({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "tool_choice", "give one of them"),
    ],
)
def test_chats_that_are_refused(fields, param, why):
    _assert_refused(chat, fields, param, why)


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"prompt": None}, "prompt", "is missing"),
        ({"prompt": 3}, "prompt", "is 3"),
        ({"prompt": [1, 100]}, "prompt", "has 100; give token ids"),
        ({"prompt": [1, -1]}, "prompt", "has -1; give token ids from 0"),
        ({"prompt": ["a", 3]}, "prompt[1]", "is 3"),
        ({"prompt": ["a", [True]]}, "prompt[1]", "is [True]"),
        ({"prompt": ["a"] * 257}, "n", "is 1 for each of 257 prompts"),
        ({"prompt": ["a"] * 3, "n": 86}, "n", "at most 256 answers"),
        ({"logprobs": 21}, "logprobs", "from 0 to 20"),
        ({"logprobs": True}, "logprobs", "a whole number"),
        ({"echo": True, "stream": True}, "stream", "leave out 'echo'"),
        ({"suffix": "end"}, "suffix", "not supported"),
        ({"best_of": 2}, "best_of", "choose among them"),
        ({"messages": [USER]}, "messages", "no field"),
        ({"chat_template_kwargs": {}}, "chat_template_kwargs", "no field"),
    ],
)
def test_completions_that_are_refused(fields, param, why):
    _assert_refused(text, fields, param, why)


def _assert_refused(read, fields, param, why):
    with pytest.raises(ApiError) as refused:
        read(**fields)
    error = refused.value.body["error"]
    assert refused.value.status == 400
    assert error["param"] == param
    assert why in error["message"]
    assert len(error["message"]) < 400
    assert "\n" not in error["message"]


def test_a_body_that_is_no_object():
    with pytest.raises(ApiError, match="give a JSON object"):
        read_chat([1], vocab_size=100)
