"""Chat templates that never end, reach for attributes or fill the memory: one line each, in bounded time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron_rl.preflight.inputs import template_problems
from megatron_rl.tokenizer import load_tokenizer
from tests.support.tiny import write_tokenizer

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def _problems(tokenizer: Path, folder: Path, template: object, deadline_s: float = 60.0) -> list[str]:
    directory = shutil.copytree(tokenizer, folder / "tokenizer")
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return [problem.text for problem in template_problems(load_tokenizer(str(directory)), deadline_s)]


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
        ("{{ 'x' * 2000000000 }}", "cannot render a single question (MemoryError"),
        ("{{ 'x' * 1000000 }}", "makes more than 100,000 characters"),
        ("hello", "leaves out what the user says: 'What is 2 + 3?' becomes 'hello'"),
    ],
)
def test_what_does_not(tokenizer: Path, tmp_path: Path, template: object, fault: str) -> None:
    (line,) = _problems(tokenizer, tmp_path, template)
    assert line.startswith(f"the chat template of tokenizer '{tmp_path / 'tokenizer'}' ")
    assert fault in line and line.endswith("or use the tokenizer of a chat model")
    assert "\n" not in line and len(line) < 900


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
        "{% endfor %}",
        "{{ 9 ** (9 ** 9) }}",  # one operation in C, which no signal interrupts
    ],
)
def test_what_never_ends_is_stopped(tokenizer: Path, tmp_path: Path, template: str) -> None:
    (line,) = _problems(tokenizer, tmp_path, template, deadline_s=0.5)
    assert "does not end: a single question takes more than 0.5 s" in line
