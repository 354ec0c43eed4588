"""Standard streams that are closed, and output that nobody reads: a line, and no traceback."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest

from tests.support.ranks import REPOSITORY

CLOSED, UNREAD = "standard output is closed; send it somewhere", "what reads the output has ended, so this ends, too"
CLI, ENVIRONMENTS, TORCHRUN = ["-m", "megatron_rl.cli"], ["-m", "megatron_rl.environments"], ["train_rl.py"]
OPENED = "from megatron_rl.signals import with_streams as w; print(w(lambda: open('pyproject.toml').fileno())())"


def _ended(words: list[str], closed: int | None, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    def close() -> None:
        if closed is not None:
            os.close(closed)

    return subprocess.run(
        [sys.executable, *words], stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, text=True,
        cwd=REPOSITORY, preexec_fn=close, timeout=300, env={**os.environ, "PYTHONUNBUFFERED": ""},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "closed", "code", "line"),
    [
        ([*CLI, "--version"], 1, 2, CLOSED),
        ([*ENVIRONMENTS, "--help"], 1, 2, CLOSED),
        ([*TORCHRUN, "--help"], 1, 2, CLOSED),
        ([*CLI, "--version"], 0, 0, ""),
        ([*CLI, "--version"], 2, 0, ""),
    ],
)
def test_a_stream_that_is_closed(words: list[str], closed: int, code: int, line: str) -> None:
    ended = _ended(words, closed)
    assert (ended.returncode, ended.stderr.count("\n")) == (code, 1 if line else 0), ended.stderr
    assert ended.stderr.startswith(line) and bool(ended.stdout) == (code == 0)


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_the_next_file_does_not_take_its_number(closed: int) -> None:
    code = OPENED.replace("print", "sys.exit").replace("from", "import sys; from", 1)
    assert _ended(["-c", code], closed).returncode == (2 if closed == 1 else 3)


@pytest.mark.parametrize("words", [[*CLI, "--help"], [*CLI, "export", "--help"], [*ENVIRONMENTS, "--help"]])
def test_output_that_nobody_reads(words: list[str]) -> None:
    """As of ``| true``; argparse writes the second and third help, and ends the program itself. It ignores a broken
    pipe that it sees, where Python does not buffer."""
    reader, writer = os.pipe()
    os.close(reader)
    with contextlib.closing(os.fdopen(writer)):
        ended = _ended(words, None, writer)
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1) and ended.stderr.startswith(UNREAD), ended.stderr
