"""The suite of this folder, run as root, once more without root's privileges."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megatron_rl.environments.sandbox import sandbox_problem
from tests.unit.sandbox.ordinary_user import USER

HERE = Path(__file__).parent


@pytest.mark.skipif(os.geteuid() != 0, reason="the suite itself runs as an ordinary user")
@pytest.mark.skipif(bool(sandbox_problem()), reason=sandbox_problem())
def test_the_suite_as_an_ordinary_user():
    folder = tempfile.mkdtemp()
    try:
        os.chown(folder, USER, USER)
        command = [sys.executable, str(HERE / "ordinary_user.py"), sys.executable, "-B", "-m", "pytest", "-q", "-rs"]
        command += ["--basetemp", f"{folder}/tests", "-k", "not processor and not daemon"]
        ends = ("test_how_it_ended", "test_as_many_threads_as_allowed")
        command += [str(HERE / "test_escapes.py"), *(f"{HERE / 'test_execution.py'}::{name}" for name in ends)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment |= {"HOME": folder, "TMPDIR": folder}
        ended = subprocess.run(
            command, cwd=HERE.parents[2], env=environment, capture_output=True, text=True, check=False, timeout=600
        )
    finally:
        shutil.rmtree(folder)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    assert "SKIPPED [6]" in ended.stdout and ended.stdout.count("SKIPPED") == 1
