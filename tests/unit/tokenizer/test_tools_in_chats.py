"""Tools, calls and their results in prompts and replies, through templates of the shapes that are published."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megatron_rl.chat import ChatFormat
from megatron_rl.errors import CheckpointError
from megatron_rl.run.resume import PromptFormats
from megatron_rl.tokenizer import Tokenizer, load_tokenizer
from tests.support.tiny import write_tokenizer

ROOT = Path(__file__).parents[3]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
OTHER = {"type": "function", "function": {"name": "sub", "parameters": {"type": "object", "properties": {}}}}
ASKED = ({"role": "user", "content": "2+2?"},)
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
WITH_TOOLS = (
    "{% if tools %}{% for t in tools %}[{{ t.function.name }}]{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% if 'tool_calls' in m %}{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endif %};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def calling(arguments: str) -> dict:
    call = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    runpy.run_path(str(ROOT / "examples" / "dapo_pipeline_check" / "make_tokenizer.py"))["main"](folder)
    return load_tokenizer(str(folder)).formatting(ChatFormat(WITH_TOOLS))


def test_the_template_gets_the_tools_of_the_request_or_of_the_environment(tokenizer: Tokenizer) -> None:
    run = tokenizer.formatting(by_environment={"sums": ChatFormat(tools=[TOOL])})
    assert run.render(ASKED, "sums") == "[add]user:2+2?;assistant:"
    assert run.render(ASKED, "sums", [TOOL, OTHER]) == "[add][sub]user:2+2?;assistant:"
    assert run.render(ASKED, "sums", []) == run.render(ASKED) == "user:2+2?;assistant:"
    assert run.decode(run.encode_prompt(ASKED, "sums")) == "[add]user:2+2?;assistant:"
    assert run.decode(run.encode_prompt(ASKED, tools=[OTHER])) == "[sub]user:2+2?;assistant:"


def test_arguments_are_objects_and_null_content_is_empty(tokenizer: Tokenizer) -> None:
    result = {"role": "tool", "tool_call_id": "call_0", "content": "3"}
    shown = tokenizer.render((*ASKED, calling('{"a": 1, "b": "\\u00e9"}'), result))
    assert shown == 'user:2+2?;assistant:add{"a": 1, "b": "é"};tool:3;assistant:'
    silent = {"role": "assistant", "content": None, "tool_calls": []}
    assert tokenizer.render((*ASKED, silent)) == "user:2+2?;assistant:;assistant:", "as clients write it"
    joining = "{% for m in messages %}{{ m.role + ':' + m.content }};{{ 'calls' if 'tool_calls' in m }}{% endfor %}"
    assert tokenizer.formatting(ChatFormat(joining)).render((*ASKED, silent)) == "user:2+2?;assistant:;"


@pytest.mark.parametrize("arguments", ["{", "[1]", "3", '{"a": NaN}'])
def test_arguments_that_are_no_object_stay_as_the_model_wrote_them(tokenizer: Tokenizer, arguments: str) -> None:
    assert tokenizer.render((*ASKED, calling(arguments))).startswith(f"user:2+2?;assistant:add{json.dumps(arguments)}")


def test_a_reply_of_a_tool_joins_the_turn_without_a_seam(tokenizer: Tokenizer) -> None:
    run = tokenizer.formatting(by_environment={"sums": ChatFormat(tools=[TOOL])})
    said, result = "add", {"role": "tool", "tool_call_id": "call_0", "content": "3"}
    ids = run.encode_prompt(ASKED, "sums") + run.encode(said) + run.encode_reply(ASKED, [result], False, "sums")
    assert run.decode(ids) == run.render((*ASKED, {"role": "assistant", "content": said}, result), "sums")
    shown_late = tokenizer.formatting(ChatFormat(PLAIN + "{{ tools | length if tools }}"))
    assert shown_late.decode(shown_late.encode_reply(ASKED, [result], False, tools=[TOOL, OTHER])) == ";tool:3;2"


def test_a_template_that_ignores_tools_is_noticed(tokenizer: Tokenizer) -> None:
    run = tokenizer.formatting(by_environment={"plain": ChatFormat(PLAIN)})
    assert run.ignores_tools("plain") and not run.ignores_tools()


def test_a_resume_compares_the_tools(tokenizer: Tokenizer) -> None:
    def formats(*tools: dict) -> PromptFormats:
        return PromptFormats(tokenizer.formatting(by_environment={"a": ChatFormat(tools=tools)}), [("a", ASKED)])

    formats(TOOL).load_state_dict(formats(json.loads(json.dumps(TOOL))).state_dict())
    assert "tools" not in formats().state_dict()["a"], "as in checkpoints from before there were tools"
    for began, goes_on in (((TOOL,), (TOOL, OTHER)), ((), (TOOL,)), ((TOOL,), ())):
        with pytest.raises(CheckpointError, match="the chats of 'a' have another list of tools"):
            formats(*goes_on).load_state_dict(json.loads(json.dumps(formats(*began).state_dict())))


HERMES = WITH_TOOLS + "{% if false %}<tool_call>{'name': name, 'arguments': arguments}</tool_call>{% endif %}"
GLM = WITH_TOOLS + "{% if false %}<tool_call>{{ name }}<arg_key>a</arg_key><arg_value>b</arg_value>{% endif %}"


def test_the_parser_goes_by_the_template_or_by_the_flag(tokenizer: Tokenizer) -> None:
    run = tokenizer.formatting(ChatFormat(HERMES), {"glm": ChatFormat(GLM), "plain": ChatFormat(PLAIN)})
    assert [run.tool_call_parser(name) for name in ("", "glm", "plain")] == ["hermes", "glm", ""]
    named = run.formatting(ChatFormat(HERMES, tool_call_parser="llama"))
    assert [named.tool_call_parser(name) for name in ("", "glm", "plain")] == ["llama"] * 3


def test_without_a_template_there_is_no_parser(tmp_path: Path) -> None:
    assert load_tokenizer(str(write_tokenizer(tmp_path))).tool_call_parser() == ""


def test_of_several_templates_the_one_for_tools_counts(tmp_path: Path) -> None:
    settings = write_tokenizer(tmp_path) / "tokenizer_config.json"
    templates = {"default": PLAIN, "tool_use": HERMES}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": templates}))
    several = load_tokenizer(str(tmp_path))
    assert several.tool_call_parser() == "hermes" and not several.ignores_tools()


def test_special_tokens_that_calls_are_read_by_are_decoded(tmp_path: Path) -> None:
    """Llama's <|python_tag|> is special, and so are <tool_call> in Hermes 3 and the end token, which is no text."""
    backend = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path))
    backend.add_special_tokens({"additional_special_tokens": ["<|python_tag|>", "<tool_call>", "</tool_call>"]})
    special = Tokenizer(backend, "special")
    ids = special.encode("<|python_tag|><tool_call>3</tool_call>") + [special.end_token_id]
    assert len(ids) == 5
    assert special.decode(ids) == special.decode(ids, "") == "3"
    assert special.decode(ids, "llama") == "<|python_tag|>3"
    assert special.decode(ids, "hermes") == special.decode(ids, "glm") == "<tool_call>3</tool_call>"


def test_a_resume_compares_the_parser_of_tools(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    with_tools, asked = tokenizer.formatting(ChatFormat(HERMES), {"a": ChatFormat(tools=[TOOL])}), [("a", ASKED)]
    with caplog.at_level("INFO"):
        began = PromptFormats(with_tools, asked).state_dict()
    assert "a: calls of its tools are read by the parser hermes" in caplog.text
    PromptFormats(with_tools.formatting(ChatFormat(HERMES, tool_call_parser="hermes")), asked).load_state_dict(began)
    with pytest.raises(CheckpointError, match="have another parser of tool calls than when the run began"):
        PromptFormats(with_tools.formatting(ChatFormat(HERMES, tool_call_parser="glm")), asked).load_state_dict(began)
