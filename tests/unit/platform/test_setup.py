"""tools/setup.sh on a machine without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools.has_everything import wanted

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


def test_requirements_end_where_the_tests_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install .` knows no constraints.txt: what it may take includes the tested versions and ends behind them."""
    monkeypatch.setitem(sys.modules, "setuptools", sys.modules.get("setuptools"))
    asked = [Requirement(line) for line in wanted(ROOT / "setup.py", ["agents", "verifiers", "export", "evaluate"])]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {(pin := Requirement(line)).name.lower(): pin for line in lines}
    for requirement in asked:
        (pin,) = pins[requirement.name].specifier
        assert requirement.specifier.contains(pin.version), requirement
        assert any(clause.operator == "<" for clause in requirement.specifier), f"{requirement} has no end"
    (torch,) = [requirement for requirement in asked if requirement.name == "torch"]
    assert torch.specifier.contains("2.13.0+cpu") and not torch.specifier.contains("2.15.0")
    cores = {str(Requirement(line).marker): Requirement(line) for line in lines if line.startswith("megatron-core")}
    (core,) = [requirement for requirement in asked if requirement.name == "megatron-core"]
    versions = {pin.version for each in cores.values() for pin in each.specifier}
    assert versions == {"0.16.1", "0.19.2"}, "on Python 3.11 and 3.12"
    assert all(core.specifier.contains(version) for version in versions)


def test_the_pinned_triton_is_the_one_that_the_pinned_torch_asks_for() -> None:
    """As the CUDA build's metadata say; a CPU build names no triton."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert (pins["torch"], pins["triton"]) == ("2.13.0", "3.7.1"), "change both, by the Requires-Dist of torch's wheel"


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
    setup.write_text(setup.read_text().replace('"torch>=2.11,<2.14"', '"torch>=99"'))
    done = subprocess.run([sys.executable, checkout / "tools/has_everything.py"], capture_output=True, text=True)
    assert done.returncode == 1
    assert [line.partition(": ")[0] for line in done.stderr.splitlines()] == ["torch>=99"]
    done = set_up(checkout, TORCH="torch>=99", VENV_FLAGS="--without-pip")
    assert done.returncode != 0
    assert "installing" in done.stderr
    assert "PIP_EXTRA_INDEX_URL has the index of PyTorch's CPU builds" in done.stderr
