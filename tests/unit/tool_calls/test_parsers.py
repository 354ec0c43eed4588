"""What is particular to one form of calls; what all have in common is tests/contracts/test_tool_call_contract.py."""

from __future__ import annotations

import pytest

from megatron_rl.environments.tool_calls import Parsed, parse, parser_for

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "sub")]
ADD = ("add", {"a": 1})


def glm_tool(**types: dict) -> list[dict]:
    return [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": types}}}]


def read(text: str, parser: str, tools: list[dict] = TOOLS) -> Parsed:
    return parse(text, tools, parser)


def calls(text: str, parser: str) -> list[tuple[str, dict]]:
    return [(call.name, dict(call.arguments)) for call in read(text, parser).calls]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('{"name": "add", "arguments": {"a": 1}', "Expecting ',' delimiter"),
        ("{'name': 'add'}", "Expecting property name enclosed in double quotes"),
        ("", "Expecting value"),
        ("[1]", "it is no JSON object"),
        ('{"arguments": {}}', "it has no name"),
        ('{"name": "", "arguments": {}}', "it has no name"),
        ('{"name": "add", "arguments": [1]}', "its arguments are no JSON object"),
        ('{"name": "add", "arguments": "{"}', "Expecting property name"),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN is not JSON"),
        ('{"name": "add", "arguments": {"a": 1e999}}', "Out of range float values"),
        ('{"name": "add", "arguments": {"a": 1, "a": 2}}', "the key 'a' occurs twice"),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}', "a text holds the lone surrogate"),
        ('{"name": "\\ud800", "arguments": {}}', "a text holds the lone surrogate"),
        ('{"name": "add"} {"name": "add"}', "</tool_call> does not follow its JSON"),
        ('{"name": "add", "arguments": {"a": ' + "[" * 70 + "]" * 70 + "}}", "nested more than 64 deep"),
        ("[" * 5000, "nested too deeply"),
    ],
)
def test_hermes_says_why_it_cannot_read(body: str, problem: str) -> None:
    text = f"<tool_call>{body}</tool_call>"
    parsed = read(f'{text} <tool_call>{{"name": "add", "arguments": {{"a": 1}}}}</tool_call>', "hermes")
    assert [(call.name, call.arguments) for call in parsed.calls] == [ADD], "the next is read all the same"
    assert parsed.content == text and len(parsed.problems) == 1 and problem in parsed.problems[0]


def test_hermes_goes_on_at_the_next_call() -> None:
    parsed = read('<tool_call>{"name": <tool_call>{"name": "add", "arguments": {"a": 1}}', "hermes")
    assert calls(parsed.content + "</tool_call>", "hermes") == []
    assert (len(parsed.calls), len(parsed.problems), parsed.content) == (1, 1, '<tool_call>{"name":')


def test_llama_knows_a_call_from_other_json() -> None:
    prose = 'Such as {"a": 1}, or {"name": "Ann", "age": 3} ; or none.'
    assert read(prose, "llama") == Parsed(prose)
    assert calls('{"name": "add", "parameters": {"a": 1}}', "llama") == [ADD]
    assert calls('{"name": "add", "arguments": {"a": 1}}', "llama") == [ADD]
    assert calls('<|python_tag|> {"name": "add", "parameters": {"a": 1}}', "llama") == [ADD]
    assert calls('<function=add>{"a": 1}', "llama") == [ADD], "a stop string may have taken the end"
    unreadable = ("<|python_tag|>print(3)", '{"name": 3, "parameters": {}} ; and {}', '<function=add>{} and')
    for wrong in (*unreadable, '{"name": "add", "parameters": {"a": 1}'):
        assert read(wrong, "llama").content == wrong and len(read(wrong, "llama").problems) == 1


def test_glm_takes_what_the_schema_says() -> None:
    def argument(value: str, **schema: object) -> object:
        text = f"<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
        return dict(read(text, "glm", glm_tool(a=schema)).calls[0].arguments)["a"]

    assert argument('"5"', type="string") == '"5"'
    assert argument("5", type="string") == "5" and argument("5", type="integer") == 5
    assert argument("5") == 5 and argument("five") == "five"
    assert argument("null", type=["string", "null"]) is None and argument("no", type=["string", "null"]) == "no"
    assert argument("5", type=["string", "null"]) == "5"
    assert argument("[1, 2]", type="array") == [1, 2] and argument('{"b": "c"}', type="object") == {"b": "c"}
    assert argument("a\n<b> </tool_call> c", type="string") == "a\n<b> </tool_call> c"
    assert argument("x", type="integer") == "x", "which its problem then tells"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("add\n<arg_key>a</arg_key>\n<arg_value>1", "the value of 'a' has no end"),
        ("add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>", "it neither goes on nor ends after 1 of its arguments"),
        ("add\n<arg_key>a</arg_key>", "it neither goes on nor ends after 0 of its arguments"),
        ("</tool_call>", "it has no name"),
        ("add" + "\n<arg_key>a</arg_key><arg_value>1</arg_value>" * 2 + "</tool_call>", "the key 'a' occurs twice"),
        ("add\n<arg_key>a</arg_key><arg_value>1e999</arg_value></tool_call>", "Out of range float values"),
    ],
)
def test_glm_says_why_it_cannot_read(body: str, problem: str) -> None:
    parsed = read(f"<tool_call>{body}", "glm")
    assert parsed.content == f"<tool_call>{body}" and not parsed.calls
    assert len(parsed.problems) == 1 and problem in parsed.problems[0]


def test_an_answer_of_nothing_but_faults_has_no_calls() -> None:
    good = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert len(read("<tool_call>{</tool_call>" * 99 + good, "hermes").calls) == 1
    flood = good + "<tool_call>{</tool_call>" * 200
    parsed = read(flood, "hermes")
    assert (parsed.content, parsed.calls, len(parsed.problems)) == (flood, (), 100)


def test_ids_have_the_prefix() -> None:
    text = '<tool_call>{"name": "add"}</tool_call>' * 2
    assert [call.id for call in parse(text, TOOLS, prefix="call_7").calls] == ["call_7_0", "call_7_1"]


def test_templates_of_other_forms_have_no_parser() -> None:
    tagged = "<tool_call>\n<function=add>{{ tool_call.arguments }}</function></tool_call>"
    for template in ("", "{{ messages }}", tagged, "<|plugin|>"):
        assert parser_for(template) == ""


def test_qwen_coder_takes_the_lines_between_its_tags() -> None:
    def argument(value: str, **schema: object) -> object:
        text = f"<tool_call>\n<function=add>\n<parameter=a>{value}</parameter>\n</function>\n</tool_call>"
        return dict(read(text, "qwen_coder", glm_tool(a=schema)).calls[0].arguments)["a"]

    assert argument("\n5\n", type="string") == "5" and argument("\n5\n", type="integer") == 5
    assert argument("\n\n  a\n\n") == "\n  a\n" and argument("a") == "a" and argument("\n\n") == ""
    assert argument("\na </function> </tool_call>\n") == "a </function> </tool_call>"
    assert calls("<function=add>\n<parameter=a>\n1\n</parameter>\n</function>", "qwen_coder") == [ADD], "as it is seen"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("", "it neither goes on nor ends after 0 of its arguments"),
        ('{"name": "add"}', "it neither goes on nor ends after 0 of its arguments"),
        ("<function=></function>", "it has no name"),
        ("<function=add><parameter=a>1", "the value of 'a' has no end"),
        ("<function=add><parameter=a>1</parameter>", "it neither goes on nor ends after 1 of its arguments"),
        ("<function=add>" + "<parameter=a>1</parameter>" * 2 + "</function>", "the key 'a' occurs twice"),
    ],
)
def test_qwen_coder_says_why_it_cannot_read(body: str, problem: str) -> None:
    parsed = read(f"<tool_call>{body}", "qwen_coder")
    assert parsed.content == f"<tool_call>{body}" and not parsed.calls
    assert len(parsed.problems) == 1 and problem in parsed.problems[0]


SAYS = {
    "hermes": ('<tool_call>{"name": "add", "arguments": {"a": "', '"}}</tool_call>'),
    "mistral": ('[TOOL_CALLS][{"name": "add", "arguments": {"a": "', '"}}]'),
    "llama": ('{"name": "add", "parameters": {"a": "', '"}}'),
    "glm": ("<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>", "</arg_value>\n</tool_call>"),
    "qwen_coder": ("<tool_call>\n<function=add>\n<parameter=a>\n", "\n</parameter>\n</function>\n</tool_call>"),
}


@pytest.mark.parametrize("parser", SAYS)
@pytest.mark.parametrize("argument", ["a </think> b", "</think>", "<think>", "<think>a</think> and </think>"])
@pytest.mark.parametrize("thought", ["", "<think>draft</think>\n", "draft</think>"])
def test_a_mark_of_thoughts_in_an_argument_is_part_of_it(parser: str, argument: str, thought: str) -> None:
    before, after = SAYS[parser]
    parsed = read(f"{thought}{before}{argument}{after}", parser, glm_tool(a={"type": "string"}))
    assert [dict(call.arguments) for call in parsed.calls] == [{"a": argument}] and not parsed.problems
    assert parsed.content == thought.strip()


@pytest.mark.parametrize("parser", SAYS)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<think>{draft}</think>{call}", ["call"]),
        ("{draft}</think>{call}", ["call"]),
        ("<think>a</think>So: <think>{draft}</think>{call}", ["call"]),
        ("<think>a</think>{call}<think>{draft}</think>", ["call"]),
        ("<think>a</think>{call}<think>{draft}", ["call"]),
        ("<think>a</think>hm, {draft}</think>{call}", ["call"]),
        ("{call}<think>{draft}</think>", ["call"]),
        ("<think>{draft}", []),
    ],
)
def test_a_call_that_is_drafted_in_a_thought_is_not_made(parser: str, text: str, said: list[str]) -> None:
    before, after = SAYS[parser]
    shown = {name: f"{before}{name}{after}" for name in ("draft", "call")}
    whole = text.replace("{draft}", shown["draft"]).replace("{call}", shown["call"])
    parsed = read(whole, parser, glm_tool(a={"type": "string"}))
    assert [call.arguments["a"] for call in parsed.calls] == said
    assert (shown["draft"] in parsed.content) and shown["call"] not in parsed.content
