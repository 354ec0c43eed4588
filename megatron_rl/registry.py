"""Extensions by name. One file of a package is one extension; a reference names one that lies anywhere else.

    RECIPES.names()                             ('fp8', ..., 'none'), read off the files: nothing is imported
    RECIPES.get("fp8-block")                    RECIPE of quantization/recipes/fp8_block.py; a dash is an underscore
    LOSSES.get("my_package.losses:Asymmetric")  of an installed package, or of one in the current directory
    LOSSES.get("experiments/mine.py:Asymmetric")
    LOSSES.stated("gspo", "AGGREGATION")        a constant of its class or file, without running it

Each registry stands beside its protocol; those that a flag names stand at the end, where they are read without torch.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from megatron_rl.errors import ConfigError, one_line, shorten
from megatron_rl.user_files import read_text

T = TypeVar("T")


class Registry(Generic[T]):
    """All extensions of one kind: its name in messages, the package of their files, the name that each file defines."""

    def __init__(self, what: str, package: str, defines: str) -> None:
        self.what, self.package, self.defines = what, package, defines
        self._folder = Path(__file__).parents[1] / package.replace(".", "/")
        self._found: dict[str, ModuleType] = {}

    def names(self) -> tuple[str, ...]:
        """List the names, sorted and spelt as their files."""
        paths = sorted(self._folder.glob("*.py"))
        return tuple(path.stem for path in paths if path.stem != "__init__" and self.defines in _definitions(path))

    def get(self, name: str) -> T:
        """Import an extension; ``ConfigError`` names the value, what there is and the nearest."""
        module, wanted = self.module(name), name.rpartition(":")[2] if ":" in name else self.defines
        if wanted not in vars(module):
            raise ConfigError([f"{self.what} {shorten(name)}: its file defines no {unknown(wanted, vars(module))}"])
        return vars(module)[wanted]

    def module(self, name: str) -> ModuleType:
        """Import the module of an extension, of a name once; raises as `get`."""
        if name in self._found:  # a parser is asked for by every turn of a conversation
            return self._found[name]
        if ":" not in name:
            wanted, known = name.replace("-", "_"), self.names()
            if wanted not in known:
                raise ConfigError([f"there is no {self.what} {unknown(name, known)}"])
            self._found[name] = importlib.import_module(f"{self.package}.{wanted}")
            return self._found[name]
        try:
            return import_reference(name.rpartition(":")[0])
        except (Exception, SystemExit) as error:
            reason = one_line(f"{type(error).__name__}: {error}")
            raise ConfigError([
                f"{self.what} {shorten(name)} cannot be imported from {os.getcwd()}: {reason}; write "
                "package.module:name or file.py:name"
            ]) from error

    def stated(self, name: str, constant: str) -> Any:
        """Read the literal that the extension's class or file assigns to ``constant``, without running it; else None.

        What a class inherits is not seen; of a call, ``option(0.2, gt=0)``, it is the first argument. ``ConfigError``
        if the file is no Python, or assigns something else than a literal.
        """
        path = self._file(name)
        found = {} if path is None else _definitions(path)
        owner = name.rpartition(":")[2] if ":" in name else self.defines
        made = found.get(owner)
        if isinstance(made, ast.Call) and isinstance(made.func, ast.Name):  # RECIPE = Fp8()
            owner = made.func.id
        value = found.get(f"{owner}.{constant}", found.get(constant))
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "option":
            value = value.args[0]
        try:
            return None if value is None else ast.literal_eval(value)
        except ValueError as error:
            raise ConfigError([f"{path}: {constant} must be a literal, it is read without running the file"]) from error

    def _file(self, name: str) -> Path | None:
        where = name.rpartition(":")[0]
        if where and not where.endswith(".py"):
            _look_here()
            spec = _spec(where)
            return Path(spec.origin) if spec is not None and spec.has_location else None
        path = Path(where) if where else self._folder / f"{name.replace('-', '_')}.py"
        return Path(os.path.realpath(path)) if os.path.isfile(path) else None


def _spec(module: str) -> ModuleSpec | None:
    """Find a module without running the packages it is in, as `importlib.util.find_spec` would."""
    first, *others = module.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        return None
    for part in others:
        spec = spec and PathFinder.find_spec(part, spec.submodule_search_locations or [])
    return spec


def import_reference(where: str) -> ModuleType:
    """Import ``package.module`` or ``file.py``, also in the current directory. Raises whatever its code raises."""
    _look_here()
    return _import_file(Path(os.path.realpath(where))) if where.endswith(".py") else importlib.import_module(where)


def _import_file(path: Path) -> ModuleType:
    """Import a file once, however often it is named."""
    name = f"{path.stem} in {path.parent}"
    if name not in sys.modules:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise ImportError(f"{path} is not a file")
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)  # dataclasses look their module up
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _look_here() -> None:
    """Import from the current directory, too, as `python -m` does."""
    if not {os.getcwd(), ""} & set(sys.path):
        sys.path.append(os.getcwd())


def unknown(name: str, known: Iterable[str]) -> str:
    """Write for a message the name, what is nearest to it and what there is."""
    public = [candidate for candidate in known if not candidate.startswith("_")]
    near = difflib.get_close_matches(name.replace("-", "_"), public, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "nothing is called like it."
    return one_line(f"{shorten(name)}: {hint} Available: {', '.join(public)}")


@functools.cache
def _definitions(path: Path) -> dict[str, ast.expr | None]:
    """Read the names that a file and its classes (``Loss.name``) define, with the values of those that are assigned."""
    try:
        body = ast.parse(read_text(path)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # nested too deeply
        raise ConfigError([f"{path} is no Python: {one_line(str(error))}"]) from error
    found: dict[str, ast.expr | None] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = None
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}": value for name, value in _assigned(node.body).items()}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: None for alias in node.names}
    return found | _assigned(body)


def _assigned(body: Sequence[ast.stmt]) -> dict[str, ast.expr | None]:
    found: dict[str, ast.expr | None] = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node.value
        elif isinstance(node, ast.Assign):
            found |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
    return found


ADVANTAGES = Registry[Any]("advantage", "megatron_rl.algorithms.advantages", "Advantage")
LOSSES = Registry[Any]("policy loss", "megatron_rl.algorithms.losses", "Loss")
CORRECTIONS = Registry[Any]("correction", "megatron_rl.algorithms.corrections", "Correction")
FILTERS = Registry[Any]("group filter", "megatron_rl.algorithms.filters", "Filter")
RECIPES = Registry[Any]("quantisation recipe", "megatron_rl.quantization.recipes", "RECIPE")
REASONING = Registry[Any]("reasoning parser", "megatron_rl.endpoint.reasoning", "PARSER")
PARSERS = Registry[Any]("parser of tool calls", "megatron_rl.environments.tool_calls.parsers", "PARSER")
