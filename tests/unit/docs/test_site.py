"""The documents as a site; only where the extra ``docs`` is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="pip install '.[docs]'")
ROOT = Path(__file__).parents[3]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What the site is made of."""
    for name in ("docs", "examples", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for path in (*ROOT.glob("*.md"), ROOT / "mkdocs.yml", ROOT / "LICENSE"):
        shutil.copy(path, tmp_path)
    return tmp_path


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"], cwd=folder, capture_output=True, text=True
    )


def test_it_is_built_without_a_warning(copy: Path) -> None:
    done = build(copy)
    assert done.returncode == 0, done.stderr
    site = copy / "build" / "site"
    assert "tutorial.html" in (site / "index.html").read_text()
    assert (site / "source/examples/slurm/train.sbatch.txt").is_file()


@pytest.mark.parametrize("link", ["nowhere.md", "metrics.md#nowhere", "../examples/nowhere.sh"])
def test_a_dead_link_is_an_error(copy: Path, link: str) -> None:
    with (copy / "docs" / "glossary.md").open("a") as page:
        page.write(f"\n[dead]({link})\n")
    assert build(copy).returncode != 0
