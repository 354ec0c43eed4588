"""`/v1/responses`, by OpenAI's client and as recorded bodies."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from megatron_rl.chat import ChatFormat
from megatron_rl.endpoint.calls import Call, Endpoint
from megatron_rl.endpoint.dialects.openai_responses import read_responses
from tests.support.endpoint import client, completion, listening, post, scripted

PATH = "/v1/responses"
ASK: dict[str, Any] = {"model": "policy", "input": "1+2"}
TOOL = {"type": "function", "name": "add", "description": None, "strict": True,
        "parameters": {"type": "object", "properties": {}}}  # fmt: skip
CALL = '<tool_call>{"name": "add", "arguments": {"a": "é"}}</tool_call>'
CALLED = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": "{}"}


def message(role: str, *texts: str, kind: str = "input_text") -> dict[str, Any]:
    parts = [{"type": kind, "text": text, "annotations": []} for text in texts]
    return {"type": "message", "id": "m", "role": role, "content": parts}


def thinking(tokenizer):
    return tokenizer.formatting(ChatFormat(tool_call_parser="hermes"))


def test_items_become_chat_messages():
    items = [
        {"role": "developer", "content": "Round."},
        message("user", "1+", "2"),
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        message("assistant", "I add.", kind="output_text"),
        CALLED,
        CALLED | {"call_id": "c2", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "4"}]},
        CALLED | {"call_id": "c3"},
        {"type": "function_call_output", "call_id": "c3", "output": ""},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        message("assistant", "3", kind="output_text"),
        message("assistant", "4", kind="output_text"),
        message("user", "So?"),
    ]
    more = {"instructions": "Be brief.", "max_output_tokens": 9, "store": True, "metadata": {"a": "b"}, "top_p": 0.5}
    more |= {"tools": [TOOL], "parallel_tool_calls": False, "include": ["reasoning.encrypted_content"]}
    asked = read_responses(ASK | {"input": items} | more, 256)

    def call(number: str, arguments: str = "{}") -> dict[str, Any]:
        return {"id": number, "type": "function", "function": {"name": "add", "arguments": arguments}}

    assert asked.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Round."},
        {"role": "user", "content": "1+2"},
        {"role": "assistant", "content": "I add.", "reasoning_content": "hm",
         "tool_calls": [call("c1"), call("c2", '{"a": 1}')]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "tool", "content": "4", "tool_call_id": "c2"},
        {"role": "assistant", "content": None, "tool_calls": [call("c3")]},
        {"role": "tool", "content": "", "tool_call_id": "c3"},
        {"role": "assistant", "content": "3"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "So?"},
    )  # fmt: skip
    assert asked.tools == ({"type": "function", "function": {"name": "add", "parameters": TOOL["parameters"]}},)
    assert (asked.one_call, asked.options.drawing.max_new_tokens, asked.options.drawing.top_p) == (True, 9, 0.5)


def test_forced_calls_and_formats():
    for choice in ("required", {"type": "function", "name": "add"}):
        asked = read_responses(ASK | {"tools": [TOOL], "tool_choice": choice}, 256)
        assert [tool["function"]["name"] for tool in asked.forced] == ["add"]
    assert not read_responses(ASK | {"tools": [TOOL], "tool_choice": "none"}, 256).reads_calls
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    format = {"type": "json_schema", "name": "n", "strict": True, "schema": schema}
    assert '"integer"' in read_responses(ASK | {"text": {"format": format}}, 256).options.shape.rule
    plain = {"format": {"type": "text"}, "verbosity": "medium"}
    assert read_responses(ASK | {"text": plain}, 256).options.shape is None


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "tool", "content": "3"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [message("user", "a", kind="input_image")]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "output": "3"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"stop": ["a"]}, "stop"),
        ({"input": "a" * 300}, "input"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(tokenizer, change, param):
    with listening(tokenizer) as endpoint:
        answer = post(endpoint, ASK | change, PATH)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_whole_answer(endpoint: Endpoint):
    answer = client(endpoint).responses.create(**ASK, instructions="Hm", metadata={"a": "b"}, max_output_tokens=50)
    assert (answer.output_text, answer.status, answer.error, answer.incomplete_details) == (
        "éHm:1+2=0", "completed", None, None,
    )  # fmt: skip
    assert [item.type for item in answer.output] == ["message"]
    assert (answer.instructions, answer.metadata, answer.max_output_tokens) == ("Hm", {"a": "b"}, 50)
    assert (answer.tools, answer.tool_choice, answer.parallel_tool_calls) == ([], "auto", True)
    assert (answer.store, answer.previous_response_id) == (False, None)
    # é is two bytes
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (7, 11, 18)


def test_an_answer_that_is_cut(tokenizer):
    with scripted(tokenizer, lambda call: completion(tokenizer, "It is", "length")) as endpoint:
        whole = client(endpoint).responses.create(**ASK)
        last = [*client(endpoint).responses.create(**ASK, stream=True)][-1]
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (last.type, last.response.output_text) == ("response.incomplete", "It is")


@pytest.mark.parametrize("said", ["It is 3", f"<think>hm é</think>So: {CALL}{CALL}", CALL, "", "<think>hm</think>"])
def test_a_stream_has_the_items_of_the_whole_answer(tokenizer, said):
    asked = ASK | {"tools": [TOOL]}
    with scripted(thinking(tokenizer), lambda call: completion(tokenizer, said), reasoning="think") as endpoint:
        ask = client(endpoint).responses
        whole = ask.create(**asked)
        events = [*ask.create(**asked, stream=True)]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    items: list[dict[str, Any]] = []
    grown: list[str] = []
    for event in events[2:-1]:
        assert event.output_index == len(items) - (event.type != "response.output_item.added")
        if event.type == "response.output_item.added":
            items.append(event.item.model_dump())
            grown.append("")
        elif event.type.endswith(".delta"):
            grown[-1] += event.delta
        elif event.type == "response.output_item.done":
            items[-1] = event.item.model_dump()
        elif event.type in ("response.output_text.done", "response.reasoning_text.done"):
            assert event.text == grown[-1]
    completed = [item.model_dump() for item in events[-1].response.output]
    assert items == completed
    without_ids = {"id": None}
    assert [item | without_ids for item in completed] == [item.model_dump() | without_ids for item in whole.output]
    texts = [item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"] for item in items]
    assert texts == grown
    assert events[-1].response.usage == whole.usage
    assert whole.usage.output_tokens_details.reasoning_tokens == len(tokenizer.encode(texts[0])) * ("<think>" in said)
    assert [item["type"] for item in items].count("function_call") == said.count(CALL)
    assert ("reasoning" in {item["type"] for item in items}) == ("<think>" in said)


def test_a_history_goes_on_from_the_tokens_of_its_answers(tokenizer):
    """The answer's items come back as they are."""
    calls: list[Call] = []
    said = [f"<think>hm</think>I add. {CALL}", "It is 3", "Sure"]

    def answer(call: Call):
        calls.append(call)
        return completion(tokenizer, said[len(calls) - 1])

    with scripted(thinking(tokenizer), answer, reasoning="think") as endpoint:
        session = endpoint.open_session("")
        ask, items = client(endpoint, session).responses, [{"role": "user", "content": "1+2"}]
        for more in ("tool", "user", ""):
            items += ask.create(model="policy", input=items, tools=[TOOL]).output
            if more == "tool":
                items.append({"type": "function_call_output", "call_id": items[-1].call_id, "output": "3"})
            elif more:
                items.append({"role": "user", "content": "Sure?"})
        end = endpoint.close_session(session)
    assert [call.after for call in calls] == [None, calls[0].number, calls[1].number]
    assert [tokenizer.decode(call.ids) for call in calls[1:]] == ["(3)", "Sure?="]
    assert (end.edited, len(end.calls)) == (0, 3)


def test_a_stream_that_fails_raises_in_the_client(tokenizer):
    with listening(tokenizer) as endpoint:
        session = endpoint.open_session("")
        stream = client(endpoint, session).responses.create(**ASK, stream=True)
        endpoint.wait_blocking(60)
        endpoint.close_session(session)
        with pytest.raises(openai.APIError, match="session"):
            list(stream)
