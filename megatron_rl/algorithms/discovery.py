"""Finds algorithms by their file: ``losses/clip.py`` is the loss ``clip``. Nothing is registered.

An extension is a module of ``advantages``, ``losses`` or ``corrections`` that defines ``compute``; other modules
there (helpers) are passed over, by ``config.extensions``. A dash in a name stands for an underscore of the file.
Corrections can be composed: ``token_tis+veto``.
"""

from __future__ import annotations

import difflib
import importlib
from types import ModuleType
from typing import Any, Literal, cast, get_args, overload

from megatron_rl.algorithms.corrections.composition import compose
from megatron_rl.algorithms.interfaces import AdvantageMethod, CorrectionFunction, LossFunction
from megatron_rl.config.extensions import extension_names
from megatron_rl.errors import ConfigError

Kind = Literal["advantages", "losses", "corrections"]


def available(kind: Kind) -> tuple[str, ...]:
    """Names of all extensions of a kind, sorted, spelt as their files: those that the help lists.

    Raises:
        ConfigError: there is no such kind.
    """
    if kind not in get_args(Kind):
        raise ConfigError([_unknown("kind of algorithm", kind, kind, get_args(Kind))])
    return extension_names(f"algorithms/{kind}", "compute")


def advantage(name: str) -> AdvantageMethod:
    """The module of an advantage; ``dr-grpo`` and ``dr_grpo`` are the same.

    Raises:
        ConfigError: there is no such name; the message names the nearest ones.
    """
    return cast(AdvantageMethod, _module("advantages", name))


@overload
def get(kind: Literal["losses"], name: str) -> LossFunction: ...
@overload
def get(kind: Literal["corrections"], name: str) -> CorrectionFunction: ...
def get(kind: Kind, name: str) -> Any:
    """The ``compute`` function of a loss or a correction; a dash stands for an underscore.

    Raises:
        ConfigError: there is no such kind or name; the message names the nearest ones.
    """
    if kind == "corrections":
        return compose([module.compute for module in correction_modules(name)])
    return _module(kind, name).compute


def correction_modules(name: str) -> tuple[ModuleType, ...]:
    """The files that ``token_tis+veto`` is composed of, in that order.

    Raises:
        ConfigError: a name that is not there, one line for each, or one that is there twice.
    """
    modules, problems = [], []
    for part in name.split("+"):
        try:
            modules.append(_module("corrections", part.strip()))
        except ConfigError as error:
            problems += error.lines
    if len(set(modules)) < len(modules):
        problems.append(f"'{name}' has a correction twice, which would square its weights; name each once")
    if problems:
        raise ConfigError(problems)
    return tuple(modules)


def _module(kind: Kind, name: str) -> ModuleType:
    known = available(kind)
    wanted = name.replace("-", "_")
    if wanted not in known:
        raise ConfigError([_unknown(f"algorithm in {kind}/ named", name, wanted, known)])
    return importlib.import_module(f"megatron_rl.algorithms.{kind}.{wanted}")


def _unknown(what: str, name: str, wanted: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "there is no similar name."
    return f"there is no {what} '{name}': {hint} Available: {', '.join(known)}"
