"""Whether this interpreter can run the project as it is: exit code 0, or what is missing and 1.

    python tools/has_everything.py [extra ...]

Versions are those that setup.py asks for. wandb and evaluate are asked for by flags of their own only.
"""

from __future__ import annotations

import ast
import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path

OPTIONAL = {"wandb", "evaluate"}


def wanted(setup: Path, extras: Sequence[str]) -> list[str]:
    """Requirements of the project and of its ``extras``, from the text of setup.py."""
    call = next(n for n in ast.walk(ast.parse(setup.read_text())) if isinstance(n, ast.Call) and _name(n) == "setup")
    values = {keyword.arg: keyword.value for keyword in call.keywords}
    known = ast.literal_eval(values["extras_require"])
    return ast.literal_eval(values["install_requires"]) + [line for extra in extras for line in known[extra]]


def _name(call: ast.Call) -> str:
    return getattr(call.func, "id", "")


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
