"""Extensions as their files say, without importing them: help and defaults must not wait for torch.

``algorithms/losses/gspo.py`` is the loss ``gspo``. An extension is a module of such a folder that defines the name its
kind asks for (``compute``); other modules there are helpers.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

_LIBRARY = Path(__file__).parents[1]


@functools.cache
def extension_names(folder: str, defines: str) -> tuple[str, ...]:
    """Names of all extensions of a kind, sorted, spelt as their files.

    Args:
        folder: in the library, ``algorithms/losses``.
        defines: what a module must define on its top level to be one.
    """
    paths = sorted((_LIBRARY / folder).glob("*.py"))
    return tuple(path.stem for path in paths if path.stem != "__init__" and defines in _definitions(path))


def stated(folder: str, name: str, constant: str) -> Any:
    """The literal that an extension's file assigns to ``constant``; None where there is no such file or constant."""
    path = _LIBRARY / folder / f"{name.replace('-', '_')}.py"
    value = _definitions(path).get(constant) if path.is_file() else None
    return None if value is None else ast.literal_eval(value)


@functools.cache
def _definitions(path: Path) -> dict[str, ast.expr | None]:
    """Names on the top level of a module, with the value of those that are assigned."""
    found: dict[str, ast.expr | None] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = None
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node.value
        elif isinstance(node, ast.Assign):
            found |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: None for alias in node.names}
    return found
