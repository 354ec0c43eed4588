"""Whether this interpreter can run the project as it is: exit code 0, or what is missing and 1.

    python tools/has_everything.py [extra ...]

Versions are those that setup.py asks for. A run does without wandb, the tests without evaluate.
"""

from __future__ import annotations

import importlib.metadata
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

OPTIONAL = {"wandb", "evaluate"}


def wanted(setup: Path, extras: Sequence[str]) -> list[str]:
    """Requirements of the project and of its ``extras``: what setup.py hands to setuptools, which need not be there."""
    given: dict[str, Any] = {}
    stand_in = ModuleType("setuptools")
    stand_in.setup, stand_in.find_packages = given.update, lambda **_: []
    sys.modules["setuptools"] = stand_in
    runpy.run_path(str(setup))
    return [*given["install_requires"], *(line for extra in extras for line in given["extras_require"][extra])]


def problem(line: str) -> str | None:
    """Why a requirement is not met; None if it is, or if nobody needs it."""
    from packaging.requirements import Requirement

    requirement = Requirement(line)
    if requirement.name in OPTIONAL or (requirement.marker and not requirement.marker.evaluate()):
        return None
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{line}: not there"
    return None if requirement.specifier.contains(version, prereleases=True) else f"{line}: {version} is there"


def main() -> None:
    """See the module."""
    try:
        problems = [problem(line) for line in wanted(Path(__file__).parents[1] / "setup.py", sys.argv[1:])]
    except ImportError as error:  # no `packaging`: an interpreter with torch has it
        problems = [str(error)]
    sys.exit("\n".join(filter(None, problems)) or None)


if __name__ == "__main__":
    main()
