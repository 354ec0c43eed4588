"""tools/setup.sh on a machine without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """As much of the project as the set-up looks at, in a folder whose name has a space."""
    copy = tmp_path / "a checkout"
    (copy / "tools").mkdir(parents=True)
    for name in ("setup.py", "README.md", "constraints.txt", "tools/setup.sh", "tools/has_everything.py"):
        shutil.copy(ROOT / name, copy / name)
    (copy / "of_the_checkout.py").write_text("")
    return copy


def set_up(checkout: Path, *extras: str, **variables: str) -> subprocess.CompletedProcess[str]:
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PYTHON": sys.executable}
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHONPATH"))}
    command = ["bash", str(checkout / "tools/setup.sh"), *extras]
    return subprocess.run(command, env=environment | offline | variables, capture_output=True, text=True)


def test_an_interpreter_that_has_everything_is_used_as_it_is(checkout: Path) -> None:
    for _ in range(2):
        done = set_up(checkout)
        assert done.returncode == 0, done.stderr
        assert done.stderr == f"{sys.executable} has everything: nothing is installed\n"
    script = "import sys, of_the_checkout; print(sys.executable, sys.argv[1:])"
    run = [checkout / ".venv/bin/python", "-c", script, "two words"]
    said = subprocess.run(run, cwd="/", env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == f"{sys.executable} ['two words']"
    activated = ["bash", "-c", '. ".venv/bin/activate"; command -v python torchrun']
    said = subprocess.run(activated, cwd=checkout, capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == [str(checkout / ".venv/bin" / name) for name in ("python", "torchrun")]
    assert "-m torch.distributed.run" in (checkout / ".venv/bin/torchrun").read_text()


def test_one_that_lacks_something_is_not(checkout: Path) -> None:
    setup = checkout / "setup.py"
    setup.write_text(setup.read_text().replace('"torch>=2.11"', '"torch>=99"'))
    done = subprocess.run([sys.executable, checkout / "tools/has_everything.py"], capture_output=True, text=True)
    assert done.returncode == 1
    assert [line.partition(": ")[0] for line in done.stderr.splitlines()] == ["torch>=99"]
    done = set_up(checkout, TORCH="torch>=99", VENV_FLAGS="--without-pip")
    assert done.returncode != 0
    assert "installing" in done.stderr
