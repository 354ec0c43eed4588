"""The gate on size: a small tree with one excess of each kind."""

import tomllib
from pathlib import Path

import pytest

from tools import budgets

LIBRARY = {
    "megatron_rl/base.py": "import json\n",
    "megatron_rl/engine/step.py": (
        "from dataclasses import dataclass\nfrom megatron_rl import base\n\n\n@dataclass\nclass Request:\n"
        "    a: int\n    b: int\n    c: int\n\n\ndef _draw():\n    x = 1\n    return x\n"
    ),
    "megatron_rl/loop.py": "from typing import TYPE_CHECKING\nfrom megatron_rl.engine.step import Request\n"
                           "if TYPE_CHECKING:\n    from megatron_rl.never import Imported\n",
    "tests/test_x.py": "from megatron_rl.engine import step\n\n\ndef test_it():\n    step._draw()\n    step._others\n",
    "README.md": "Two words\n",
    "docs/page.md": "# One page\n",
    "docs/flags.md": "generated, so not counted\n",
    "docs/decisions/001.md": "not counted either\n",
}
ALLOWED = """
file = "budgets.toml"
[limits]
library_lines = 19
library_files = 3
library_packages = 1
benchmark_lines = 0
document_words = 5
private_reaches = 1
import_chain = 3
record = 3
file = 14
function = 3
private_names_of_others = []
[packages]
"." = 5
engine = 14
[records]
[files]
[functions]
"""


@pytest.fixture
def exceeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, text in LIBRARY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(budgets, "ROOT", tmp_path)
    monkeypatch.setattr(budgets, "LIBRARY", tmp_path / "megatron_rl")

    def names(allowed: str) -> list[str]:
        return [row.name for row in budgets.figures(tomllib.loads(allowed)) if row.value > row.budget]

    return names


def test_all_hold(exceeded) -> None:
    assert exceeded(ALLOWED) == []


def test_a_record_has_the_fields_of_the_one_it_extends(exceeded) -> None:
    step = budgets.LIBRARY / "engine" / "step.py"
    step.write_text(step.read_text() + "\n\n@dataclass\nclass Longer(Request):\n    d: int\n", encoding="utf-8")
    assert "record Longer" in exceeded(ALLOWED)


@pytest.mark.parametrize(
    ("line", "lowered", "named"),
    [
        ("library_lines = 19", "library_lines = 18", "library: lines"),
        ("library_files = 3", "library_files = 2", "library: files"),
        ("library_packages = 1", "library_packages = 0", "library: packages"),
        ("document_words = 5", "document_words = 4", "documents: words"),
        ("private_reaches = 1", "private_reaches = 0", "tests: reaches into private names"),
        ("import_chain = 3", "import_chain = 2", "library: longest import chain"),
        ("engine = 14", "engine = 13", "package engine: lines"),
        ("engine = 14\n", "", "package engine: lines"),
        ("record = 3", "record = 2", "record Request"),
        ("file = 14", "file = 13", "file megatron_rl/engine/step.py"),
        ("function = 3", "function = 2", "function megatron_rl/engine/step.py:_draw"),
        ("[records]", "[records]\nRequest = 2", "record Request"),
        ("[records]", "[records]\nGone = 2", "record Gone: in budgets.toml, but not in the code"),
    ],
)
def test_what_is_too_large_is_named(exceeded, line: str, lowered: str, named: str) -> None:
    assert line in ALLOWED
    assert named in exceeded(ALLOWED.replace(line, lowered))
