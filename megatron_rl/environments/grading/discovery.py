"""Finds the kinds of graders by their file: ``grading/dapo.py`` is the kind ``dapo``. Nothing is registered.

A kind is a module of this package that defines ``judge(completion, gold) -> Grade`` and ``REWARDS``, the lowest
and the highest reward; with ``NEEDS_WORKER = True`` it is only run where it can be killed.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from types import ModuleType

from megatron_rl.environments import grading
from megatron_rl.environments.naming import suggestion
from megatron_rl.errors import ConfigError


def kinds() -> tuple[str, ...]:
    """The names of all kinds, sorted."""
    names = (module.name for module in pkgutil.iter_modules(grading.__path__))
    return tuple(sorted(name for name in names if hasattr(_import(name), "judge")))


@cache
def kind_module(kind: str) -> ModuleType:
    """The module of a kind; ``ConfigError`` with the nearest names when there is none."""
    if not kind.isidentifier() or kind not in kinds():
        raise ConfigError([f"there is no grader {kind!r}{suggestion(kind, kinds())}"])
    return _import(kind)


def _import(name: str) -> ModuleType:
    return importlib.import_module(f"{grading.__name__}.{name}")
