"""Answers that come while they are drawn, and calls of tools in them."""

from __future__ import annotations

import pytest

from megatron_rl.endpoint.answers import AnswerReader
from megatron_rl.endpoint.calls import Call
from megatron_rl.tokenizer import Tokenizer
from tests.support.endpoint import ADD, ASK, byte_tokenizer, client, completion, scripted


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
    decoder = reader.decoder()
    shown = [reader.final_parts(decoder.decode(ids[:count]))[1] for count in range(1, len(ids) + 1)]
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
    assert reader.final_parts(reader.decoder().decode(hermes.encode("<think>is a < {b}")))[1] == "<think>is a < {b}"


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
