"""`/v1/messages`: Anthropic's requests as recorded bodies; with `--long` its own client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from megatron_rl.chat import ChatFormat
from megatron_rl.endpoint.calls import Call, Endpoint
from megatron_rl.endpoint.dialects.anthropic_messages import read_messages
from megatron_rl.endpoint.fields import ApiError
from tests.support.endpoint import ADD, client, completion, listening, post, scripted

PATH = "/v1/messages"
ASK: dict[str, Any] = {"model": "policy", "max_tokens": 64, "messages": [{"role": "user", "content": "1+2"}]}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": "é"}}</tool_call>'


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said} | more


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The data of all events, each named as its ``event`` line says."""
    events = []
    for event in answer.text.strip().split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_a_conversation_becomes_chat_messages():
    messages = [
        {"role": "user", "content": [text("1+", cache_control={"type": "ephemeral"}), text("2")]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"}, text("I add."),
            {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
            {"type": "tool_use", "id": "c2", "name": "add", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [text("3"), text("!")]},
            {"type": "tool_result", "tool_use_id": "c2", "is_error": True},
            text("So?"),
        ]},
    ]  # fmt: skip
    more = {
        "system": [text("Be "), text("brief.")], "tools": [TOOL], "stop_sequences": ["."], "top_k": 5,
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "thinking": {"type": "disabled"},
        "metadata": {"user_id": "u"}, "temperature": 1,
    }  # fmt: skip
    asked = read_messages(ASK | {"messages": messages} | more, 256)

    def call(number: str, arguments: str) -> dict[str, Any]:
        return {"id": number, "type": "function", "function": {"name": "add", "arguments": arguments}}

    assert asked.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+2"},
        {"role": "assistant", "content": "I add.", "reasoning_content": "hm",
         "tool_calls": [call("c1", '{"a": 1}'), call("c2", "{}")]},
        {"role": "tool", "content": "3!", "tool_call_id": "c1"},
        {"role": "tool", "content": "", "tool_call_id": "c2"},
        {"role": "user", "content": "So?"},
    )  # fmt: skip
    function = {"name": "add", "description": "Adds.", "parameters": TOOL["input_schema"]}
    assert asked.tools == ({"type": "function", "function": function},)
    assert (asked.one_call, asked.reads_calls, asked.forced) == (True, True, ())
    assert asked.template_kwargs == {"enable_thinking": False}
    drawing = asked.options.drawing
    assert (drawing.max_new_tokens, drawing.stop, drawing.top_k, drawing.temperature) == (64, (".",), 5, 1.0)


def test_forced_calls_and_formats():
    for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
        asked = read_messages(ASK | {"tools": [TOOL], "tool_choice": choice}, 256)
        assert [tool["function"]["name"] for tool in asked.forced] == ["add"]
    assert not read_messages(ASK | {"tools": [TOOL], "tool_choice": {"type": "none"}}, 256).reads_calls
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = read_messages(ASK | {"output_config": {"format": {"type": "json_schema", "schema": schema}}}, 256)
    assert '"integer"' in asked.options.shape.rule


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "3"}]}, "messages[0].role"),
        ({"messages": [*ASK["messages"], {"role": "assistant", "content": "It"}]}, "messages[1]"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"thinking": {"type": "loud"}}, "thinking.type"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"n": 2}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(tokenizer, change, param):
    with listening(tokenizer) as endpoint:
        answer = post(endpoint, ASK | change, PATH)
    assert answer.status_code == 400
    error = answer.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert repr(param) in error["error"]["message"], error


def test_errors_have_anthropics_form(endpoint: Endpoint):
    def ask(body: Any = ASK, path: str = PATH, **headers: str) -> tuple[int, str]:
        key = {"x-api-key": endpoint.token}
        answer = httpx.post(endpoint.url + path, json=body, headers=key | headers)
        return answer.status_code, answer.json()["error"]["type"]

    assert ask(**{"x-api-key": "wrong"}) == (401, "authentication_error")
    assert ask(**{"x-api-key": "wrong", "Authorization": f"Bearer {endpoint.token}"}, body={}) == (
        400, "invalid_request_error",
    )  # fmt: skip
    assert ask(ASK | {"model": "other"}) == (404, "not_found_error")
    assert ask(path="/sessions/none/v1/messages") == (410, "not_found_error")
    assert ask(path="/v1/messages/batches") == (404, "not_found_error")
    with pytest.raises(ApiError) as caught:
        read_messages([], 256)
    assert caught.value.status == 400


def test_an_answer_ends_as_anthropic_names_it(tokenizer):
    answers = iter(["It is 3", "It is 3. Or 4", "It is"])
    reasons = iter(["stop", "stop_string", "length"])
    with scripted(tokenizer, lambda call: completion(tokenizer, next(answers), next(reasons))) as endpoint:
        told = [post(endpoint, ASK | {"stop_sequences": ["Or", "."]}, PATH).json() for _ in range(3)]
    assert [(each["stop_reason"], each["stop_sequence"]) for each in told] == [
        ("end_turn", None), ("stop_sequence", "."), ("max_tokens", None),
    ]  # fmt: skip
    assert [each["content"] for each in told] == [[text("It is 3")], [text("It is 3")], [text("It is")]]
    assert (told[0]["type"], told[0]["role"], told[0]["model"]) == ("message", "assistant", "policy")
    # 1+2= and the seven letters with their end
    assert told[0]["usage"] == {
        "input_tokens": 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 8,
    }  # fmt: skip


@pytest.mark.parametrize("said", ["It is 3", f"<think>hm é</think>So: {CALL}{CALL}", CALL, "", "<think>hm</think>"])
def test_a_stream_has_the_blocks_of_the_whole_answer(tokenizer, said):
    thinking = tokenizer.formatting(ChatFormat(tool_call_parser="hermes"))
    asked = ASK | {"tools": [TOOL]}
    with scripted(thinking, lambda call: completion(tokenizer, said), reasoning="think") as endpoint:
        whole = post(endpoint, asked, PATH).json()
        start, *events, delta, stop = events_of(post(endpoint, asked | {"stream": True}, PATH))
    assert (start["type"], delta["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    assert start["message"]["content"] == [] and start["message"]["usage"]["input_tokens"] > 0
    blocks: list[dict[str, Any]] = []
    open_block = None
    for event in events:
        kind = event["type"].removeprefix("content_block_")
        if kind == "start":
            assert (open_block, event["index"]) == (None, len(blocks))
            open_block = len(blocks)
            blocks.append(event["content_block"])
            continue
        assert event["index"] == open_block
        if kind == "stop":
            open_block = None
        elif event["delta"]["type"] == "input_json_delta":
            blocks[-1]["input"] = json.loads(event["delta"]["partial_json"])
        else:
            name = event["delta"]["type"].removesuffix("_delta")
            blocks[-1][name] += event["delta"][name]
    assert open_block is None
    assert blocks == whole["content"]
    assert (delta["delta"]["stop_reason"], delta["usage"]) == (whole["stop_reason"], whole["usage"])
    assert whole["stop_reason"] == ("tool_use" if CALL in said else "end_turn")
    assert [block["type"] for block in blocks].count("tool_use") == said.count(CALL)
    assert ("thinking" in {block["type"] for block in blocks}) == ("<think>" in said)


def test_a_history_goes_on_from_the_tokens_of_its_answers(tokenizer):
    """Also from one that chat completions had."""
    calls: list[Call] = []
    said = [f"<think>hm</think>I add. {CALL}", "It is 3", "Sure"]

    def answer(call: Call):
        calls.append(call)
        return completion(tokenizer, said[len(calls) - 1])

    with scripted(tokenizer.formatting(ChatFormat(tool_call_parser="hermes")), answer, reasoning="think") as endpoint:
        session = endpoint.open_session("")
        path, asked = f"/sessions/{session}{PATH}", ASK | {"tools": [TOOL]}
        first = post(endpoint, asked, path).json()["content"]
        results = [{"type": "tool_result", "tool_use_id": first[-1]["id"], "content": "3"}]
        messages = [*ASK["messages"], {"role": "assistant", "content": first}, {"role": "user", "content": results}]
        second = post(endpoint, asked | {"messages": messages}, path).json()["content"]
        plain = [
            *ASK["messages"],
            {"role": "assistant", "content": "I add.", "tool_calls": [
                {"id": first[-1]["id"], "type": "function", "function": {"name": "add", "arguments": '{"a":"é"}'}},
            ]},
            {"role": "tool", "tool_call_id": first[-1]["id"], "content": "3"},
            {"role": "assistant", "content": second[0]["text"]},
            {"role": "user", "content": "Sure?"},
        ]  # fmt: skip
        tools = [{"type": "function", "function": ADD["function"] | {"description": "Adds."}}]
        client(endpoint, session).chat.completions.create(model="policy", messages=plain, tools=tools)
        end = endpoint.close_session(session)
    assert [block["type"] for block in first] == ["thinking", "text", "tool_use"]
    assert [call.after for call in calls] == [None, calls[0].number, calls[1].number]
    assert [tokenizer.decode(call.ids) for call in calls[1:]] == ["(3)", "Sure?="]
    assert (end.edited, len(end.calls)) == (0, 3)


def test_count_tokens(endpoint: Endpoint):
    body = {"model": "policy", "system": "Be brief", "messages": ASK["messages"]}
    assert post(endpoint, body, f"{PATH}/count_tokens").json() == {"input_tokens": len("Be brief:1+2=")}
    refused = post(endpoint, body | {"mcp_servers": [{}]}, f"{PATH}/count_tokens").json()
    assert (refused["type"], refused["error"]["type"]) == ("error", "invalid_request_error")


def test_a_stream_that_fails_says_so(tokenizer):
    with listening(tokenizer) as endpoint:
        session = endpoint.open_session("")
        path = f"{endpoint.url}/sessions/{session}{PATH}"
        headers = {"x-api-key": endpoint.token}
        with httpx.stream("POST", path, json=ASK | {"stream": True}, headers=headers, timeout=60) as stream:
            endpoint.wait_blocking(60)
            endpoint.close_session(session)
            last = stream.read().decode().strip().split("\n\n")[-1]
    assert last.startswith("event: error\n")
    assert json.loads(last.split("data: ")[1])["error"]["type"] == "not_found_error"


@pytest.mark.long
def test_anthropics_client(tokenizer):
    anthropic = pytest.importorskip("anthropic")
    said = f"<think>hm</think>So: {CALL}"
    thinking = tokenizer.formatting(ChatFormat(tool_call_parser="hermes"))
    with scripted(thinking, lambda call: completion(tokenizer, said), reasoning="think") as endpoint:
        session = endpoint.open_session("")
        address = {"base_url": endpoint.base_url(session).removesuffix("/v1"), "api_key": endpoint.token}
        asks = anthropic.Anthropic(**address, max_retries=0).messages
        asked = ASK | {"tools": [TOOL]}
        whole = asks.create(**asked)
        with asks.stream(**asked) as stream:
            streamed = stream.get_final_message()
        counted = asks.count_tokens(model="policy", messages=ASK["messages"], tools=[TOOL])
        with pytest.raises(anthropic.BadRequestError, match="top_logprobs"):
            asks.create(**asked, extra_body={"top_logprobs": 1})
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert whole.content[2].input == {"a": "é"}
    assert whole.model_dump(exclude={"id"}) == streamed.model_dump(exclude={"id"})
    assert counted.input_tokens == whole.usage.input_tokens
