"""What every parser of tool calls must hold to, found by its file: a new one is tested by being there.

So is the one that docs/extending.md shows, which lies outside of the library.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.environments.tool_calls import Parsed, parse, parser_for
from megatron_rl.environments.tool_calls.parser import Parser, Schemas, Unreadable
from megatron_rl.registry import PARSERS

DOCS = Path(__file__).parents[2] / "docs" / "extending.md"
ARGUMENTS = (
    {},
    {"text": 'she said "no" and <tool_call> \\ "}</tool_call>', "n": 1},
    {"text": "naïve 日本語 🙂\n\ttab", "flag": True, "none": None, "share": -0.5},
    {"text": "5", "nested": {"list": [1, [2, {"a": "}{"}]]}, "empty": ""},
    {"text": "x" * 1000 + "</function>"},
)
"""Without the end of a value in GLM's form, which has no way to say it."""
TEXTS = {"type": "object", "properties": {name: {"type": "string"} for name in ("text", "empty")}}
SCHEMAS: Schemas = {"one": TEXTS, "two-2.b": TEXTS}


@pytest.fixture(params=[*PARSERS.names(), "internlm_calls.py:PARSER"])
def name(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (text,) = re.findall(r"```python\n# internlm_calls\.py\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "internlm_calls.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return request.param


@pytest.fixture
def parser(name: str) -> Parser:
    return PARSERS.get(name)


def said(parsed: Parsed) -> list[tuple[str, dict]]:
    return [(call.name, dict(call.arguments)) for call in parsed.calls]


def tools(schemas: Schemas) -> list[dict]:
    named = [{"name": name, "parameters": dict(schema)} for name, schema in schemas.items()]
    return [{"type": "function", "function": function} for function in named]


def test_published_answers(name: str, parser: Parser) -> None:
    assert len(parser.examples) >= 2
    for example in parser.examples:
        schemas = example.tools or {called: {"type": "object"} for called, _ in example.calls}
        parsed = parse(example.text, tools(schemas), name)
        assert said(parsed) == list(example.calls) and parsed.content == example.content and not parsed.problems
        new = [parser.new_id("call", number) for number in range(len(example.calls))]
        written = example.ids or [""] * len(new)
        assert [call.id for call in parsed.calls] == [own or other for own, other in zip(written, new, strict=True)]
        assert len(set(new)) == len(new)
        assert not any(call.problem for call in parsed.calls)


def test_its_template_is_claimed_by_it_alone(name: str, parser: Parser) -> None:
    assert parser.writes(parser.template) and not parser.writes("{{ messages }}")
    known = [name] if name in PARSERS.names() else []
    assert [other for other in PARSERS.names() if PARSERS.get(other).writes(parser.template)] == known
    assert parser_for(parser.template) == (known or [""])[0]


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_what_it_writes_it_reads(name: str, parser: Parser, arguments: dict) -> None:
    calls = [("one", arguments), ("two-2.b", {"text": "b"}), ("one", arguments)]
    for given in (calls[:1], calls):
        for before, after in (("", ""), ("Let me see.\n", ""), ("Let me see: ", "\nThat is all.")):
            parsed = parse(before + parser.write(given) + after, tools(SCHEMAS), name)
            assert said(parsed) == given and not parsed.problems
            assert parsed.content.split() == (before + after).split()
            assert json.loads(json.dumps([call.as_message() for call in parsed.calls]))
            assert [json.loads(c.as_message()["function"]["arguments"]) for c in parsed.calls] == [a for _, a in given]


def test_unknown_functions_and_wrong_arguments_are_calls_with_a_problem(name: str, parser: Parser) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    calls = [("sum", {"a": 1}), ("add", {"a": "x"}), ("add", {}), ("add", {"a": 1})]
    found = parse(parser.write(calls), tools({"add": schema}), name)
    assert said(found) == calls
    assert [call.problem.partition(":")[0] for call in found.calls] == [
        "there is no function 'sum'",
        "a is 'x'; it must be of type integer",
        "a is missing",
        "",
    ]


def test_cut_anywhere_it_has_no_call_that_was_not_written(name: str, parser: Parser) -> None:
    """A prefix has the complete calls, and what is begun is a problem or text, never another call."""
    calls = [("one", {"text": "a b", "n": [1, 2]}), ("two-2.b", {"text": "c"})]
    whole = parser.write(calls)
    seen = set()
    for end in range(len(whole) + 1):
        parsed = parse(whole[:end], tools(SCHEMAS), name)
        assert said(parsed) == calls[: len(parsed.calls)] and len(parsed.problems) <= 1
        if not parsed.calls:
            assert parsed.content == whole[:end]
        seen.add((len(parsed.calls), bool(parsed.problems)))
    assert {(0, True), (1, True), (2, False)} <= seen


def test_thoughts_have_no_calls(name: str, parser: Parser) -> None:
    call = parser.write([("one", {"text": "a"})])
    assert said(parse(f"<think>perhaps {call}</think>\n{call}", tools(SCHEMAS), name)) == [("one", {"text": "a"})]
    assert parse(f"<think>perhaps {call}", tools(SCHEMAS), name) == Parsed(f"<think>perhaps {call}")


def wild(parser: Parser) -> Iterator[str]:
    """Answers of random damage: pieces of calls in any order, characters left out, doubled, swapped."""
    rng = random.Random(0)
    whole = parser.write([("one", arguments) for arguments in ARGUMENTS]) + "".join(parser.markers)
    words = [*parser.markers, '{"name": ', '"', "\\", "{", "}", "[", "NaN", "1e999", "\n", "one", '"\\ud800"', ":", ","]
    for _ in range(300):
        start = rng.randrange(len(whole) - 20)
        text = list(whole[start : start + 200])
        for _ in range(rng.randrange(6)):
            del text[rng.randrange(len(text)) :: rng.randrange(40, 200)]
            text.insert(rng.randrange(len(text) + 1), rng.choice(words))
        yield "".join(text)
    yield from ("".join(rng.choices(words, k=60)) for _ in range(300))


def test_nothing_it_reads_raises_and_no_text_is_lost(name: str, parser: Parser) -> None:
    for text in wild(parser):
        pieces = list(parser.read(text, SCHEMAS))
        if not any(isinstance(piece, tuple) for piece in pieces):
            assert "".join(piece.text if isinstance(piece, Unreadable) else piece for piece in pieces) == text
        for call in parse(text, tools(SCHEMAS), name).calls:
            json.dumps(call.as_message(), allow_nan=False).encode()


def test_long_answers_take_linear_time(name: str, parser: Parser) -> None:
    """0.15 s at most on an idle machine; where each begun call is read to the end of the text it is many seconds."""
    size = 500_000
    begun = [parser.write([("one", {"text": "a", "n": 1})])[:end] for end in (14, 20, 30, 45)]
    units = ["a", "{", "[", '"', "<", " ", "\\", '{"name": ', '{"name": "', '{"name": [', '{"a":', '{"name":{"name":1,']
    units += [*parser.markers, *begun]
    units += [marker + tail for marker in parser.markers for tail in ("{", "[", '"', '{"a": "', "x<arg_key>", " ")]
    units += [parser.write([("one", {"text": "a"})])]
    for unit in units:
        start = time.process_time()
        parse((unit * size)[:size], tools(SCHEMAS), name)
        assert time.process_time() - start < 1.0, repr(unit)


def test_parsing_needs_no_torch() -> None:
    code = "import sys\nfrom megatron_rl.environments.tool_calls import parse\n"
    code += "parse('<tool_call>', []); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
