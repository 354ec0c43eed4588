"""Tools in the chats of each model family: its template's calls are read, and results follow as it shows them."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from megatron_rl.chat import ChatFormat
from megatron_rl.environments.tool_calls import parse
from megatron_rl.environments.tools import ToolEnvironment, tool
from megatron_rl.registry import PARSERS
from megatron_rl.tokenizer import Tokenizer, load_tokenizer
from megatron_rl.types import Task, Turn
from tests.support.chat_templates import OF_FAMILIES

ROOT = Path(__file__).parents[3]
ASKED = {"role": "user", "content": "2+2?"}


class Sums(ToolEnvironment):
    @tool
    def add(self, a: int, note: str) -> int:
        """Adds 2."""
        return a + 2

    def tasks(self, split):
        return [Task("0", (ASKED,))]

    def grade(self, task, transcript):
        return 1.0


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    runpy.run_path(str(ROOT / "examples" / "dapo_pipeline_check" / "make_tokenizer.py"))["main"](folder)
    return load_tokenizer(str(folder))


@pytest.mark.parametrize("family", [family for family, (_, parser) in OF_FAMILIES.items() if parser])
def test_a_call_is_read_and_its_result_follows_as_the_template_shows_both(plain: Tokenizer, family: str) -> None:
    template, name = OF_FAMILIES[family]
    tokenizer, parser = plain.formatting(ChatFormat(template, tools=Sums.tools)), PARSERS.get(name)
    assert tokenizer.tool_call_parser() == name and not tokenizer.ignores_tools()
    call = ("add", {"a": 2, "note": "x y"})
    # as the model's own turn would have it: with the id that it writes, or one of ours
    number = parse(parser.write([call]), Sums.tools, name, "call_0").calls[0].id
    made = {"id": number, "type": "function", "function": {"name": call[0], "arguments": json.dumps(call[1])}}
    made = {"role": "assistant", "content": None, "tool_calls": [made]}
    result = {"role": "tool", "tool_call_id": number, "name": "add", "content": "4"}
    prompt, whole = tokenizer.render([ASKED]), tokenizer.render([ASKED, made, result])
    reply = plain.decode_raw(tokenizer.encode_reply([ASKED], [result], ended=False))
    assert whole.startswith(prompt) and whole.endswith(reply) and "4" in reply
    said = whole[len(prompt) : len(whole) - len(reply)]
    parsed = parse(said, Sums.tools, name, "call_0")
    assert [(each.name, each.arguments, each.id, each.problem) for each in parsed.calls] == [(*call, number, "")]
    assert not parsed.problems and parsed.content.strip() in ("", "<think></think>")

    [task] = Sums().tasks("train")
    assert Sums().step(task, None, Turn(said, "stop", 9, tool_call_parser=name)).messages == (result,)
    bad = Sums().step(task, None, Turn(said.replace('": 2', '": 2]'), "stop", 9, tool_call_parser=name))
    if '": 2' in said:  # the others have no JSON
        assert "cannot be read" in bad.messages[0]["content"]
        assert tokenizer.encode_reply([ASKED], bad.messages, ended=False), "no template refuses it"


def test_families_whose_templates_show_no_tools_are_noticed(plain: Tokenizer) -> None:
    for template, parser in OF_FAMILIES.values():
        if not parser:
            tokenizer = plain.formatting(ChatFormat(template, tools=Sums.tools))
            assert tokenizer.ignores_tools() and tokenizer.tool_call_parser() == ""
