"""docs/environments.md: each environment on the page is a whole file that passes the self-test as it stands."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from megatron_rl.environments.loader import find_environment
from megatron_rl.environments.selftest import run_checks

PAGE = (Path(__file__).parents[3] / "docs" / "environments.md").read_text(encoding="utf-8")
BLOCKS = [block for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) if "class " in block]


def test_there_are_four_and_each_says_where_it_goes() -> None:
    names = [re.match(r"# environments/(\w+)/__init__\.py\n", block) for block in BLOCKS]
    assert [name and name[1] for name in names] == ["parity", "guess", "sums", "prices"]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: re.search(r"class (\w+)", block)[1])
def test_it_is_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: str) -> None:
    name = re.search(r"^class (\w+)", block, re.MULTILINE)[1]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path(f"page_{name}.py".lower()).write_text(block, encoding="utf-8")
    environment = find_environment(f"page_{name.lower()}.py:{name}").from_options({})
    checks = run_checks(environment, 2)
    assert [check for check in checks if check.passed is False] == []
    assert any(check.passed for check in checks)
