"""Thoughts of the model as `reasoning_content`, where a parser is chosen."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from megatron_rl.chat import ChatFormat
from megatron_rl.endpoint.answers import AnswerReader
from megatron_rl.endpoint.calls import Call, Endpoint
from megatron_rl.endpoint.sessions import Session
from megatron_rl.registry import REASONING
from megatron_rl.tokenizer import Tokenizer, load_tokenizer
from tests.support.endpoint import ADD, ASK, byte_tokenizer, client, completion, post, scripted

CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
OPEN = "{% for m in messages %}{{ m['content'] }}|{% endfor %}{% if add_generation_prompt %}<think>\n{% endif %}"
"""As of models that always think."""


@pytest.mark.parametrize("name", REASONING.names())
def test_a_thought_and_an_answer(name: str) -> None:
    parser = REASONING.get(name)
    begin, end = parser.begin, parser.end
    for text, is_begun, parts in (
        (f"{begin}\nhm\n{end}\n\n4", False, ("hm", "4")),
        (f" {begin}{end}\n\n4 ", False, ("", "4 ")),
        (f"hm{end}4", True, ("hm", "4")),
        (f"{begin}hm{end}4", True, ("hm", "4")),
        ("hm, cut", True, ("hm, cut", "")),
        (f"{begin}hm, cut", False, ("hm, cut", "")),
        (f" 4 {begin}hm{end}", False, ("", f" 4 {begin}hm{end}")),
        (f"4{end}", False, ("", f"4{end}")),
        ("", True, ("", "")),
    ):
        assert parser.split(text, is_begun, is_whole=True) == parts


@pytest.mark.parametrize("name", REASONING.names())
def test_what_is_shown_of_a_thought_stays(name: str) -> None:
    """Whatever the text, and wherever it is cut."""
    parser, draw = REASONING.get(name), random.Random(1)
    pieces = [parser.begin, parser.end, parser.end[:3], parser.begin[:2], " ", "\n", "a", "é", "<"]
    for _ in range(300):
        text, is_begun = "".join(draw.choices(pieces, k=draw.randrange(8))), draw.random() < 0.5
        whole = parser.split(text, is_begun, is_whole=True)
        for count in range(len(text) + 1):
            shown = parser.split(text[:count], is_begun, is_whole=False)
            assert all(final.startswith(part) for final, part in zip(whole, shown, strict=True)), (text, count)


@contextlib.contextmanager
def thinking(tokenizer: Tokenizer, answer: Callable[[Call], object]) -> Iterator[Endpoint]:
    with scripted(tokenizer.formatting(ChatFormat(tool_call_parser="hermes")), answer, reasoning="think") as endpoint:
        yield endpoint


@pytest.mark.parametrize(
    ("said", "thought", "content", "num_calls"),
    [
        ("<think>\n1 and <2>\n</think>\n\nIt is 3. ", "1 and <2>", "It is 3. ", 0),
        (f"<think>a call: {CALL}</think>\nSo: {CALL}", f"a call: {CALL}", "So:", 1),
        (f"<think>hm</think>{CALL}", "hm", "", 1),
        ("It is <think>", "", "It is <think>", 0),
    ],
)
def test_answers_and_streams(tokenizer, said, thought, content, num_calls):
    with thinking(tokenizer, lambda call: completion(tokenizer, said)) as endpoint:
        ask = client(endpoint).chat.completions.create
        whole = ask(**ASK, tools=[ADD]).choices[0].message
        deltas = [chunk.choices[0].delta for chunk in ask(**ASK, tools=[ADD], stream=True)]
    assert getattr(whole, "reasoning_content", "") == thought
    assert (whole.content or "", len(whole.tool_calls or ())) == (content, num_calls)
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == thought
    assert "".join(delta.content or "" for delta in deltas) == content
    assert len(deltas[-1].tool_calls or ()) == num_calls
    reader, ids = AnswerReader(tokenizer, (), "hermes", (ADD,), reasoning="think"), tokenizer.encode(said)
    decoder = reader.decoder()
    shown = [reader.final_parts(decoder.decode(ids[:count])) for count in range(1, len(ids) + 1)]
    assert all(thought.startswith(part) and content.startswith(other) for part, other in shown)
    assert len({part for part, _ in shown}) > len(thought) // 2, "it comes while it is drawn"


def test_a_thought_that_the_prompt_begins(tmp_path):
    """And one that was cut is no answer; a grammar leaves no room for a thought."""
    tokenizer = byte_tokenizer(tmp_path, OPEN)
    answers = iter([
        completion(tokenizer, "hm</think>4"), completion(tokenizer, "hm, h", "length"), completion(tokenizer, "yes"),
    ])  # fmt: skip
    with thinking(tokenizer, lambda call: next(answers)) as endpoint:
        whole, cut, chosen = [
            post(endpoint, ASK | fields).json()["choices"][0] for fields in ({}, {}, {"guided_choice": ["yes", "no"]})
        ]
    assert whole["message"] == {"role": "assistant", "content": "4", "reasoning_content": "hm"}
    assert cut["message"] == {"role": "assistant", "content": "", "reasoning_content": "hm, h"}
    assert cut["finish_reason"] == "length"
    assert chosen["message"] == {"role": "assistant", "content": "yes"}


def test_marks_that_are_special_tokens(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    backend = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    backend.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    backend.save_pretrained(str(tmp_path))
    tokenizer = load_tokenizer(str(tmp_path))
    said = completion(tokenizer, "[THINK]hm[/THINK]4")
    choice = AnswerReader(tokenizer, reasoning="mistral").choice(said)
    assert (choice.thought, choice.text) == ("hm", "4")
    begun = AnswerReader(tokenizer, reasoning="mistral", prompt_ids=tokenizer.encode("2+2=[THINK]"))
    assert begun.choice(completion(tokenizer, "hm[/THINK]4")).thought == "hm"
    assert AnswerReader(tokenizer).choice(said).text == "hm4", "without a parser they are left out, as they were"


@pytest.mark.parametrize("returned", [True, False])
def test_a_session_keeps_the_tokens_of_thoughts(tmp_path, returned):
    """Clients send thoughts back or leave them out; with equal answers they tell which of them it was."""
    tokenizer = byte_tokenizer(tmp_path, OPEN)
    calls: list[Call] = []

    def answer(call: Call):
        calls.append(call)
        return completion(tokenizer, f"I think {call.number}</think>\n\n4")

    with thinking(tokenizer, answer) as endpoint:
        session = endpoint.open_session("")
        ask = client(endpoint, session).chat.completions.create
        choices = ask(**ASK, n=2).choices
        told = choices[1].message.model_dump(exclude_none=True)
        if not returned:
            del told["reasoning_content"]
        ask(model="policy", messages=[*ASK["messages"], told, {"role": "user", "content": "sure?"}])
        end = endpoint.close_session(session)
    assert [choice.message.reasoning_content for choice in choices] == ["I think 0", "I think 1"]
    assert [call.after for call in calls] == [None, None, calls[1].number if returned else calls[0].number]
    assert tokenizer.decode(calls[2].ids) == "|sure?|<think>\n", "nothing that was sampled is encoded again"
    assert end.edited == 0


def test_templates_get_thoughts_that_were_not_sampled_here(tmp_path):
    template = "{% for m in messages %}{{ m['content'] }}({{ m.reasoning_content }})|{% endfor %}"
    tokenizer = byte_tokenizer(tmp_path, template)
    messages = [{"role": "assistant", "content": "4", "reasoning_content": "hm"}, {"role": "user", "content": "?"}]
    (planned,) = Session("", tokenizer).begin_chat([0], tuple(messages))
    assert tokenizer.decode(planned.ids) == "4(hm)|?()|"
