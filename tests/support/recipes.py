"""The recipes' scripts, `examples/*/*.sh` that source `examples/launch.sh`: found, and asked what they would start."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.support.forks import REPOSITORY

EXAMPLES = Path(REPOSITORY) / "examples"
SCRIPTS = sorted(
    path for path in EXAMPLES.glob("*/*.sh") if '/../launch.sh"' in (text := path.read_text()) and "\nlaunch " in text
)
"""Those that train; others of a recipe prepare something."""
_ROW = re.compile(
    r"\| `(?P<script>[\w.]+)` \| (?P<model>\S+) \| (?P<ranks>\d+) \| (?P<rollouts>\S+) \| (?P<updates>\S+) \|"
)


@dataclass(frozen=True)
class Launch:
    """What a script gives to torchrun."""

    ranks: int
    torchrun: tuple[str, ...]
    flags: tuple[str, ...]
    """Of ``train_rl.py``."""


@functools.cache
def launched(script: Path, *words: str, **variables: str) -> Launch:
    """The script is run on ``words`` with a ``torchrun`` that only notes its arguments; ``variables`` are its
    environment."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = Path(folder) / "torchrun"
        launcher.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
        launcher.chmod(0o755)
        environment = {"PATH": f"{folder}:{os.environ['PATH']}", **variables}
        noted = subprocess.run(
            ["bash", str(script), *words], cwd=folder, env=environment, check=True, capture_output=True, text=True
        ).stdout.split("\0")
    place = noted.index("train_rl.py")
    nodes, each = (int(noted[noted.index(flag, 0, place) + 1]) for flag in ("--nnodes", "--nproc-per-node"))
    return Launch(nodes * each, tuple(noted[:place]), tuple(noted[place + 1 : -1]))


def family(script: Path) -> str:
    """The family of the tiny model of its rehearsal."""
    return re.search(r"^FAMILY=(\w+)$", script.read_text(), re.MULTILINE)[1]


def promised(script: Path) -> dict[str, str]:
    """The row of the recipe's README that tells model, ranks and GiB a rank.

    Raises:
        LookupError: there is none.
    """
    readme = script.with_name("README.md")
    for row in _ROW.finditer(readme.read_text()):
        if row["script"] == script.name:
            return row.groupdict()
    raise LookupError(f"{readme} has no row of {script.name}: | `{script.name}` | MODEL | RANKS | GiB | GiB |")
