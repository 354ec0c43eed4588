"""Extensions are found by their file, or named by a reference."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.errors import ConfigError
from megatron_rl.families.family import FAMILIES
from megatron_rl.models.attention.backend import BACKENDS
from megatron_rl.registry import ADVANTAGES, CORRECTIONS, FILTERS, LOSSES, PARSERS, REASONING, RECIPES, Registry

ALL = (ADVANTAGES, BACKENDS, CORRECTIONS, FAMILIES, FILTERS, LOSSES, PARSERS, REASONING, RECIPES)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return tmp_path


@pytest.mark.parametrize("registry", ALL, ids=lambda registry: registry.what)
def test_every_file_holds_what_its_kind_defines(registry: Registry) -> None:
    assert len(registry.names()) > 1
    for name in registry.names():
        assert registry.get(name) is vars(registry.module(name))[registry.defines]
        assert registry.get(name.replace("_", "-")) is registry.get(name)


def test_names_and_constants_need_no_torch() -> None:
    code = (
        "import sys; from megatron_rl.registry import *; from megatron_rl.families.family import FAMILIES\n"
        "RECIPES.names(), FAMILIES.names(), CORRECTIONS.names(), FILTERS.names()\n"
        "assert LOSSES.stated('gspo', 'clamp_eps_lower') == 3e-4 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_files_that_define_something_else_are_helpers() -> None:
    assert Registry("policy loss", "megatron_rl.algorithms", "Loss").names() == ()
    with pytest.raises(ConfigError, match=r"there is no correction 'statistics'.* Available: geometric, masked_is"):
        CORRECTIONS.get("statistics")


def test_an_unknown_name_is_refused_with_the_nearest_and_all(here: Path) -> None:
    with pytest.raises(ConfigError, match="no policy loss 'clipp': did you mean clip .*: cispo, clip, clip_cov, gspo"):
        LOSSES.get("clipp")


@pytest.mark.parametrize(
    "reference", ["mine.py:doubled", "{here}/mine.py:doubled", "mine:doubled", "inside.own:doubled"]
)
def test_a_reference_names_an_extension_outside_the_library(reference: str, here: Path) -> None:
    (here / "inside").mkdir()
    for name in ("mine.py", "inside/own.py"):
        (here / name).write_text("LEVEL = 'token'\ndef doubled(x):\n    return 2 * x\n")
    reference = reference.format(here=here)
    assert LOSSES.get(reference)(21) == 42
    assert LOSSES.get(reference) is LOSSES.get(reference)
    assert LOSSES.stated(reference, "LEVEL") == "token"
    assert LOSSES.stated(reference, "AGGREGATION") is None
    sys.modules.pop("mine", None)


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        ("absent.py:loss", "'absent.py:loss' cannot be imported from .*absent.py"),
        ("absent_module:loss", "'absent_module:loss' cannot be imported from .*No module named"),
        ("broken.py:loss", "'broken.py:loss' cannot be imported from .*ZeroDivisionError"),
        ("exits.py:loss", "'exits.py:loss' cannot be imported from .*SystemExit: 3"),
        ("fine.py:los", "its file defines no 'los': did you mean loss"),
        (":loss", "policy loss ':loss' cannot be imported"),
    ],
)
def test_what_is_wrong_with_a_reference_is_told_in_one_line(reference: str, told: str, here: Path) -> None:
    (here / "broken.py").write_text("1 / 0\n")
    (here / "exits.py").write_text("raise SystemExit(3)\n")
    (here / "fine.py").write_text("loss = print\n")
    with pytest.raises(ConfigError, match=told) as refused:
        LOSSES.get(reference)
    assert "\n" not in str(refused.value)


def test_a_file_is_read_for_constants_without_running_it(here: Path) -> None:
    (here / "own.py").write_text("LEVEL = 'token'\nBOUND = float('inf')\nraise RuntimeError\n")
    assert LOSSES.stated("own.py:compute", "LEVEL") == "token"
    assert LOSSES.stated("clipp", "AGGREGATION") is None
    with pytest.raises(ConfigError, match="BOUND must be a literal"):
        LOSSES.stated("own.py:compute", "BOUND")


def test_a_package_is_read_for_constants_without_running_it(here: Path) -> None:
    (here / "packed" / "deep").mkdir(parents=True)
    for folder in ("packed", "packed/deep"):
        (here / folder / "__init__.py").write_text("raise SystemExit(3)\n")
    (here / "packed" / "deep" / "own.py").write_text("LEVEL = 'token'\n")
    assert LOSSES.stated("packed.deep.own:compute", "LEVEL") == "token"
    assert LOSSES.stated("packed.nowhere.own:compute", "LEVEL") is None


@pytest.mark.parametrize("text", ["x = " + "(" * 100_000, "x = '\0'", "x = " + "-" * 100_000 + "1"])
def test_a_file_that_python_cannot_read_is_one_line(here: Path, text: str) -> None:
    (here / "own.py").write_text(text)
    with pytest.raises(ConfigError, match="own.py is no Python: "):
        LOSSES.stated("own.py:compute", "LEVEL")
