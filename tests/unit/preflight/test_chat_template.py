"""Chat templates that never end, reach for attributes or fill the memory: one line each, in bounded time."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.chat import ChatFormat
from megatron_rl.environments.checks import Chats, note_chat
from megatron_rl.environments.loading import Surveyed
from megatron_rl.errors import ConfigError
from megatron_rl.run.preflight.chats import chat_format, chat_problems, template_problems
from megatron_rl.tokenizer import load_tokenizer
from megatron_rl.types import Prompt
from tests.support.chats import STRICT, chat
from tests.support.tiny import tiny_config, write_tokenizer

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def _problems(tokenizer: Path, folder: Path, template: object) -> list[str]:
    directory = shutil.copytree(tokenizer, folder / "tokenizer")
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return [problem.text for problem in template_problems(load_tokenizer(str(directory)))]


@pytest.mark.parametrize("template", [CHATML, {"default": CHATML}, [{"name": "default", "template": CHATML}]])
def test_what_renders_is_fine(tokenizer: Path, tmp_path: Path, template: object) -> None:
    assert _problems(tokenizer, tmp_path, template) == []


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{{ messages.__class__.__mro__ }}", "SecurityError: access to attribute '__class__'"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "cannot render a single question ("),
        ("{{ raise_exception('no ' * 1000) }}", "cannot render a single question (TemplateError: no no"),
        ("{% for m in messages %}", "cannot render a single question (TemplateSyntaxError"),
        (3, "cannot render a single question ("),
        ({"tool_use": CHATML}, "cannot render a single question ("),
        ("hello", "leaves out what the user says: 'What is 2 + 3?' becomes 'hello'"),
    ],
)
def test_what_does_not(tokenizer: Path, tmp_path: Path, template: object, fault: str) -> None:
    (line,) = _problems(tokenizer, tmp_path, template)
    assert line.startswith(f"the chat template of tokenizer '{tmp_path / 'tokenizer'}' ")
    assert fault in line and line.endswith("or use the tokenizer of a chat model")
    assert "\n" not in line and len(line) < 900


def test_a_fault_has_the_templates_line(tokenizer: Path) -> None:
    for template, fault in (
        ("{% for m in messages %}\n{{ m.content }}\n{% endfor", "TemplateSyntaxError: unexpected end of template"),
        ("\n\n{{ nothing.there }}", "UndefinedError: 'nothing' is undefined"),
        ("\n\n{{ raise_exception('no system role') }}", "TemplateError: no system role"),
    ):
        written = load_tokenizer(str(tokenizer)).formatting(ChatFormat(template, path="own.jinja"))
        [problem] = template_problems(written)
        assert problem.text.startswith(f"chat template own.jinja cannot render a single question ({fault}")
        assert "line 3); fix it, or use the tokenizer's own" in problem.text


def test_a_template_that_leaves_out_the_system_prompt(tokenizer: Path) -> None:
    dropping = "{{ messages[-1].content }}"
    written = load_tokenizer(str(tokenizer)).formatting(ChatFormat(dropping, system_prompt="Be short."))
    [problem] = template_problems(written)
    assert "leaves out what the system prompt says: 'Be short.' becomes 'What is 2 + 3?'" in problem.text


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ({"chat_template": "none.jinja"}, "none.jinja cannot be read (No such file or directory)"),
        ({"chat_template": "."}, ". cannot be read (Is a directory)"),
        ({"chat_template_kwargs": "{enable_thinking: false}"}, "{enable_thinking: false} is not JSON (Expecting"),
        ({"chat_template_kwargs": "[1]"}, 'is [1]; give a JSON object, such as {"enable_thinking": false}'),
        ({"chat_template_kwargs": '{"tokenize": true}'}, "has 'tokenize', which is not for the template to know"),
        ({"chat_template_kwargs": '{"a": NaN}'}, "is not JSON (NaN is not JSON)"),
        ({"rl_reasoning_parser": "thin"}, "there is no reasoning parser 'thin': did you mean think"),
        ({"rl_tool_call_parser": "herms"}, "there is no parser of tool calls 'herms': did you mean hermes"),
        ({"rl_tool_call_parser": "none.py:P"}, "parser of tool calls 'none.py:P' cannot be imported"),
    ],
)
def test_flags_that_cannot_be_read_are_one_line(flags: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as refused:
        chat_format(tiny_config(**flags))
    [line] = refused.value.lines
    assert line.startswith(f"--{next(iter(flags)).replace('_', '-')}") and fault in line


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    for name, content, fault in (
        ("binary", b"\xff\xfe\x00", "is not UTF-8 text"),
        ("empty", b" \n", "is empty"),
        ("large", b"x" * (2**20 + 1), "has more than 1 MiB"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=fault):
            chat_format(tiny_config(chat_template=tmp_path / name))


def _found(name: str, is_chat: bool, chat: ChatFormat) -> Surveyed:
    return Surveyed(name, 1.0, False, 1, test_tasks=1, chats=_rows("train", FINE) if is_chat else {}, chat=chat)


def _chat_lines(tokenizer: Path, found: list[Surveyed], **flags: Any) -> list[str]:
    config = tiny_config(**flags)
    loaded = load_tokenizer(str(tokenizer)).formatting(chat_format(config))
    return [problem.text for problem in chat_problems(config, found, loaded)]


def test_what_would_have_no_effect_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(CHATML)
    plain, chat = _found("sums", False, ChatFormat()), _found("talk", True, ChatFormat())
    named = {"chat_template": tmp_path / "own.jinja"}
    assert _chat_lines(tokenizer, [plain, chat], **named, system_prompt="S") == []
    [line] = _chat_lines(tokenizer, [plain], system_prompt="S")
    assert line.startswith("--system-prompt has no effect: all prompts are plain text")
    [line] = _chat_lines(tokenizer, [chat], **named, chat_template_kwargs='{"enable_thinkin": false}')
    assert line.startswith("--chat-template-kwargs has 'enable_thinkin', which no chat template reads")
    misspelt = _found("talk", True, ChatFormat(template_kwargs={"role_": 1}))
    assert _chat_lines(tokenizer, [misspelt], **named)[0].startswith("talk: chat_template_kwargs has 'role_'")


def test_a_template_from_a_flag_or_an_entry_is_enough(tokenizer: Path, tmp_path: Path) -> None:
    """The tokenizer has none."""
    (tmp_path / "own.jinja").write_text(CHATML)
    chat = _found("talk", True, ChatFormat())
    [line] = _chat_lines(tokenizer, [chat])
    assert "has no chat template; give one with --chat-template FILE" in line
    assert _chat_lines(tokenizer, [chat], chat_template=tmp_path / "own.jinja") == []
    assert _chat_lines(tokenizer, [_found("talk", True, ChatFormat(CHATML))]) == []


def test_a_template_that_shows_no_tools(tokenizer: Path) -> None:
    """They are shown in chats alone: after a prompt that is plain text the author writes them."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    [line] = _chat_lines(tokenizer, [_found("talk", True, ChatFormat(CHATML, path="own.jinja", tools=tools))])
    assert line == (
        "chat template own.jinja shows the model no tools, and talk has some; fix it, or use the tokenizer's own"
    )
    shown = "{% if tools %}{{ tools[0].function.name }}{% endif %}" + CHATML
    hermes = shown + "{% if false %}<tool_call>{'name': n, 'arguments': a}{% endif %}"
    assert _chat_lines(tokenizer, [_found("talk", True, ChatFormat(hermes, tools=tools))]) == []
    unknown = [_found("talk", True, ChatFormat(shown, tools=tools))]
    [line] = _chat_lines(tokenizer, unknown)
    assert line.startswith("talk has tools, and its chat template writes calls in a form that no parser knows (")
    assert "hermes, " in line
    assert _chat_lines(tokenizer, unknown, rl_tool_call_parser="llama") == []
    assert _chat_lines(tokenizer, [_found("sums", False, ChatFormat(tools=tools))]) == []


FINE, SYSTEM, DOUBLE = chat("user: a"), chat("system: s", "user: a"), chat("user: a", "user: b")
NOT_SUPPORTED = "(TemplateError: System role not supported, line 3)"
ALTERNATE = "(TemplateError: Conversation roles must alternate user/assistant/user/assistant/..., line 6)"


def _rows(split: str, *prompts: Prompt) -> dict[str, list[dict[str, str]]]:
    found = Chats()
    for row, prompt in enumerate(prompts):
        note_chat(found, split, row, prompt)
    return dict(found.values())


def test_of_rows_with_the_same_roles_the_first_is_tried() -> None:
    long = chat("user: " + "x" * 999)
    rows = _rows("train", FINE, SYSTEM, "plain", long, SYSTEM, FINE)
    assert rows == {"train row 0 of user": FINE, "train row 1 of system, user": SYSTEM, "train row 2 of text": []}
    [[message]] = _rows("train", long).values()
    assert len(message["content"]) == 200
    assert len(_rows("train", *(FINE * count for count in range(1, 300)))) == 100, "bounded"
    assert _rows("train", FINE * 9999) == {}


@pytest.mark.parametrize(
    ("chats", "flags", "problem", "warning"),
    [
        (_rows("train", FINE, SYSTEM, FINE, DOUBLE), {}, "",
         f"talk: the chat template cannot render train row 1 of system, user {NOT_SUPPORTED}; "
         f"cannot render train row 3 of user, user {ALTERNATE}; rows with these roles will be skipped"),
        (_rows("train", SYSTEM, DOUBLE), {}, "talk: the chat template cannot render train row 0 of system, user", ""),
        (_rows("test", SYSTEM), {}, "", ""),
        (_rows("test", SYSTEM), {"eval_interval": 1}, "talk: the chat template cannot render test row 0 of", ""),
        (_rows("train", SYSTEM) | _rows("test", FINE, SYSTEM), {"eval_only": True, "load": "x"}, "", "test row 1 of"),
        (_rows("train", "text", SYSTEM), {}, "", "train row 1 of system, user"),
        (_rows("train", FINE), {}, "", ""),
    ],
)  # fmt: skip
def test_rows_that_the_template_refuses(tokenizer: Path, caplog, chats, flags, problem: str, warning: str) -> None:
    """A problem where no row is left, else a warning; of the rows that the run reads."""
    found = replace(_found("talk", True, ChatFormat(STRICT)), chats=chats)
    lines = _chat_lines(tokenizer, [found], **flags)
    assert [line[: len(problem)] for line in lines] == ([problem] if problem else [])
    assert all("or give another template with --chat-template" in line for line in lines)
    told = "".join(record.message for record in caplog.records)
    assert warning in told and bool(warning) == bool(told)
