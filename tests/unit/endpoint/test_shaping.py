"""What a request asks of the form of its answers, as the engine is told it."""

from __future__ import annotations

import json

import llguidance
import pytest

from megatron_rl.chat import ChatFormat
from megatron_rl.endpoint.calls import Call, outside_sessions, request_of
from megatron_rl.endpoint.fields import Fields
from megatron_rl.endpoint.structured import read_shape
from megatron_rl.environments.tool_calls import checked_tools
from megatron_rl.environments.tool_calls.schemas import schemas_of
from megatron_rl.inference.guides import literal
from megatron_rl.registry import PARSERS
from megatron_rl.tokenizer import Tokenizer
from tests.support.endpoint import ADD, ASK, completion, listening, post, scripted

REF = {"$ref": "#/$defs/names"}
REF_TOO = {"type": "object", "properties": {"a": REF}, "$defs": {"names": {"type": "array"}}}
TOOLS = {
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": REF}, "required": ["a"],
            "$defs": {"names": {"type": "array", "items": {"type": "string"}}}},
    "now": {"type": "object", "properties": {}},
    "say": {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "integer"}},
            "required": ["text"]},
}  # fmt: skip
SAID = {"text": "x < 3\nand </b>", "n": 4}
CALLS = [("add", {"a": 1, "b": ["q"]}), ("say", SAID), ("now", {}), ("say", {"text": ""})]


def matches(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    made = llguidance.LLMatcher.grammar_from_lark(grammar)
    matcher, ids = llguidance.LLMatcher(tokenizer.for_grammars(), made, log_level=0), tokenizer.encode(text)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"k": [1, null, {"z": "é"}]}', "[1]"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": REF_TOO}}}, '{"a": ["x"]}', '{"a": ""}'),
        ({"guided_json": json.dumps(TOOLS["add"])}, '{"a": 2, "b": ["x"]}', '{"a":  2}'),
        ({"guided_regex": "a/b\\/[0-9]+\n"}, "a/b/12\n", "a/b/12"),
        ({"guided_choice": ["yes", 'n"o\n']}, 'n"o\n', "n"),
        ({"structured_outputs": {"json_object": True}}, '{"a": 1}', "1"),
    ],
)
def test_shapes(tokenizer, asked, good, bad):
    grammar = f"start: {read_shape(Fields(asked)).rule}"
    assert matches(tokenizer, grammar, good)
    assert not matches(tokenizer, grammar, bad)


@pytest.mark.parametrize("name", PARSERS.names())
def test_calls_as_a_parser_writes_them_fit_its_grammar(tokenizer, name):
    parser = PARSERS.get(name)
    rules = parser.grammar(TOOLS, lambda text: literal(text, {}))
    grammar = f"start: {parser.answer(lambda text: literal(text, {}))}\n{rules}"
    assert matches(tokenizer, grammar, parser.write(CALLS))
    for wrong in ([("sub", {})], [("add", {})], [("add", {"a": "x"})], [("now", {"a": 1})], [("say", {"n": 1})]):
        assert not matches(tokenizer, grammar, parser.write(wrong))


def test_special_tokens_in_a_grammar(tokenizer):
    assert literal("<|end|>", tokenizer.special_tokens) == "<[256]>"
    rules = PARSERS.get("glm").grammar(TOOLS, lambda text: literal(text, {"</arg_value>": 256}))
    assert "v2_0: /(.|\\n)*/ <[256]>" in rules
    assert literal('a"b', tokenizer.special_tokens) == '"a\\"b"'


def asked(tokenizer: Tokenizer, **fields: object) -> tuple[list[Call], dict]:
    """The calls that a chat with a tool becomes, and what comes back."""
    calls: list[Call] = []

    def answer(call: Call):
        calls.append(call)
        return completion(tokenizer, '<tool_call>{"name": "add", "arguments": {}}</tool_call>', "stop_string")

    with scripted(tokenizer.formatting(ChatFormat(tool_call_parser="hermes")), answer) as endpoint:
        reply = post(endpoint, ASK | {"tools": [ADD]} | fields).json()
    return calls, reply


def test_one_call_is_an_answer_that_ends_there(tokenizer):
    (call,), reply = asked(tokenizer, parallel_tool_calls=False, stop=["X"])
    assert (call.stop, call.sampling.constraints) == (("X", "</tool_call>"), None)
    assert [made["function"]["name"] for made in reply["choices"][0]["message"]["tool_calls"]] == ["add"]
    assert reply["choices"][0]["finish_reason"] == "tool_calls"


def test_forced_calls_and_shapes_beside_calls(tokenizer):
    rules = PARSERS.get("hermes").grammar(schemas_of(checked_tools([ADD])), lambda text: literal(text, {}))
    for fields, start in (
        ({"tool_choice": "required"}, 'call ("\\n" call)*'),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "call"),
        ({"guided_regex": "a"}, 'call ("\\n" call)* | answer'),
    ):
        (call,), _ = asked(tokenizer, **fields)
        grammar = call.sampling.constraints.grammar
        assert grammar == f"start: {start}\n{rules}" + "\nanswer: /a/" * ("guided_regex" in fields)
    (call,), _ = asked(tokenizer, guided_regex="a", tool_choice="none")
    assert call.sampling.constraints.grammar == "start: /a/"
    row = json.loads(json.dumps(outside_sessions(call, "")))
    assert request_of(**row).sampling == call.sampling, "it is the same on the other ranks"


def test_a_seed_of_the_caller_is_of_one_prompt(tokenizer):
    """Two prompts with one seed drew the same numbers; the same prompt is to be answered alike."""
    (call,), _ = asked(tokenizer, seed=7)
    row = outside_sessions(call, "")
    first, again, other = (request_of(**row | {"ids": ids}).source.task.id for ids in ((1, 2), [1, 2], (1, 3)))
    assert first == again != other


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"3": 1}}, "logit_bias"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
    ],
)
def test_what_is_trained_on_is_drawn_from_the_model_itself(tokenizer, fields, param):
    with listening(tokenizer) as endpoint:
        session = endpoint.open_session("")
        error = post(endpoint, ASK | fields, f"/sessions/{session}/v1/chat/completions").json()["error"]
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")
    assert "trained on" in error["message"]


@pytest.mark.parametrize("fields", [{"logprobs": True, "top_logprobs": 1}, {"prompt_logprobs": 0}])
def test_scores_that_nobody_computes(tokenizer, fields):
    with listening(tokenizer) as endpoint:
        session = endpoint.open_session("")
        error = post(endpoint, ASK | fields, f"/sessions/{session}/v1/chat/completions").json()["error"]
    assert (error["code"], error["param"] in fields) == ("unsupported_parameter", True)
    assert "a session keeps those of the sampled tokens alone" in error["message"]


def test_grammars_that_cannot_be_compiled(tokenizer):
    with listening(tokenizer) as endpoint:
        for fields, param, why in (
            ({"guided_regex": "("}, "guided_regex", "cannot be made to hold"),
            ({"guided_json": {"type": "x"}}, "guided_json", "cannot be made to hold"),
            ({"guided_json": {"enum": ["x" * 2**17]}}, "guided_json", "makes a grammar of"),
            ({"guided_choice": ["x" * 2**17]}, "guided_choice", "makes a grammar of"),
        ):
            error = post(endpoint, ASK | fields).json()["error"]
            assert (error["param"], error["code"]) == (param, "invalid_value")
            assert why in error["message"]
