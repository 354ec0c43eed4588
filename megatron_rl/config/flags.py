"""A configuration field that is also a flag: what is declared beside the default, and how text becomes its value.

A section is a frozen dataclass; each of its fields is one flag::

    lr: float | None = flag(None, gt=0, common=True)
    \"\"\"Peak learning rate.\"\"\"

gives ``--lr``, a float above 0, shown by ``--help`` with the docstring as its text.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
import shlex
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from megatron_rl.errors import Problem, shorten
from megatron_rl.registry import Registry
from megatron_rl.user_files import is_entry, path_refusal

if TYPE_CHECKING:
    from megatron_rl.config.rl_config import RLConfig

Finding = tuple[str, str] | Problem
"""A broken rule: the field whose value is wrong and what is, or the whole problem where it is no single value."""
_LARGEST = 2**31 - 1
"""Whole numbers without a bound of their own: what torch and its collectives take as a size."""
_KINDS = {bool: "true or false", int: "a whole number", float: "a number"}
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag: name, type, default and help are the field's, the rest is declared in its ``flag(...)``."""

    name: str
    kind: type
    """``int``, ``float``, ``str`` or ``bool``; with ``many`` that of the items."""
    many: bool
    choices: tuple[Any, ...]
    default: Any
    help: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    off: str | None = None
    """What switches off a field that is on by default: ``--disable-bias-linear``."""
    aliases: tuple[str | Second, ...] = ()
    """Further spellings, and those with values of their own."""
    off_aliases: tuple[str, ...] = ()
    path: bool = False
    """It names a file or directory."""
    or_entry: bool = False
    """In place of a path it may be a YAML mapping in braces."""
    common: bool = False
    """Shown by ``--help`` and not only by ``--help-all``."""
    names_of: Registry | None = None
    """The extensions that it names."""
    derived: Callable[..., Any] | None = None
    """Default that follows from other flags: ``derived(config, world_size)``, None where they are absent."""
    source: str | None = None
    """What it derives from, for messages."""
    needed: tuple[str, str] | None = None
    """Why a run cannot do without it, and an example."""

    @property
    def spelling(self) -> str:
        """The spelling in help and messages, with dashes."""
        return self.off or f"--{self.name.replace('_', '-')}"

    @property
    def spellings(self) -> dict[str, bool]:
        """Every accepted spelling, without dashes; False where it switches a boolean off.

        Each boolean has both, so that the command line can undo what a YAML file switched on.
        """
        on = self.name.replace("_", "-")
        spellings = {on: True} | {text.removeprefix("--"): True for text in self.aliases if isinstance(text, str)}
        if self.kind is bool:
            opposite = on.removeprefix("no-") if on.startswith("no-") else f"no-{on}"
            spellings |= {text.removeprefix("--"): False for text in (self.off or opposite, *self.off_aliases)}
        return spellings

    @property
    def seconds(self) -> list[Second]:
        """Return the spellings with values of their own."""
        return [alias for alias in self.aliases if isinstance(alias, Second)]

    def typed(self, value: Any) -> str:
        """Write a value as one types it: ``--lr 1e-06``, ``--no-bf16``; ``no --lr`` for None."""
        if value is None:
            return f"no --{self.name.replace('_', '-')}"
        if self.kind is bool:
            return next(f"--{spelling}" for spelling, switches_on in self.spellings.items() if switches_on == value)
        values = value if self.many else (value,)
        return shlex.join([f"--{self.name.replace('_', '-')}", *map(str, values)])

    def convert(self, text: str) -> Any:
        """Read one value; ``ValueError`` says what was expected instead."""
        try:
            value = _BOOLEANS[text.lower()] if self.kind is bool else self.kind(text)
        except (KeyError, ValueError):
            raise ValueError(f"is not {_KINDS[self.kind]}, got {shorten(text)}") from None
        # A NaN passes every bound, because each comparison with it is false.
        finite = self.kind is not float or math.isfinite(value)
        refusal = self.refusal(value) if finite else f"is not a finite number, got {shorten(text)}"
        if refusal is not None:
            raise ValueError(refusal)
        return value

    def refusal(self, value: Any) -> str | None:
        """Say why ``value`` is not a choice, out of bounds or no path; None if it is allowed."""
        if self.choices and value not in self.choices:
            return f"is not {listed(self.choices)}, got {shorten(value)}"
        if self.path:
            return None if self.or_entry and is_entry(value) else path_refusal(value)
        most = _LARGEST if self.kind is int and self.le is None and self.lt is None else self.le
        for bound, words, broken in (
            (self.ge, "at least", lambda bound: value < bound),
            (self.gt, "above", lambda bound: value <= bound),
            (most, "at most", lambda bound: value > bound),
            (self.lt, "below", lambda bound: value >= bound),
        ):
            if bound is not None and broken(bound):
                return f"must be {words} {bound}, got {shorten(value)}"
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Second(Flag):
    """A second spelling with values of its own, such as ``--train-samples`` of ``--train-iters``; it has no field."""

    sets: Callable[[Any], dict[str, Any]]
    """Field -> what a value stands for; `Added` is one more item of a tuple, `InUnit` waits for `resolve`."""


class Added(str):
    """One item of a field that is a tuple."""


@dataclasses.dataclass(frozen=True)
class InUnit:
    """A number in the unit of a second spelling; ``of`` makes it one in the field's unit."""

    spelling: str
    number: float
    of: Callable[[RLConfig, Any], Any]


def second(spelling: str, kind: type, sets: Callable[[Any], dict[str, Any]], **declared: Any) -> Second:
    """Make a second spelling.

    Example: ``second("--recompute-activations", bool, lambda _: {"recompute_granularity": "selective"})``.
    """
    name = spelling.removeprefix("--").replace("-", "_")
    choices = declared.pop("choices", ())
    return Second(name=name, kind=kind, many=False, choices=choices, default=None, help="", sets=sets, **declared)


def in_unit(spelling: str, field: str, kind: type, of: Callable[[RLConfig, Any], Any], **bounds: Any) -> Second:
    """Make a spelling of ``field`` in another unit."""
    return second(spelling, kind, lambda number: {field: InUnit(spelling, number, of)}, **bounds)


def option(spelling: str, field: str, name: str, **bounds: Any) -> Second:
    """Make a spelling of one option of ``field``: ``--rl-gamma 0.9`` is ``--rl-advantage-args gamma=0.9``."""
    return second(spelling, float, lambda value: {field: Added(f"{name}={str(value).removesuffix('.0')}")}, **bounds)


def flag(default: Any, **declared: Any) -> Any:
    """Make a dataclass field with what ``Flag`` declares beyond name, type, default and help."""
    return dataclasses.field(default=default, metadata=declared)


@functools.cache
def flags_of(cls: type) -> tuple[Flag, ...]:
    """Return the flags of a section class, in the order they are written."""
    hints, docs = get_type_hints(cls), attribute_docs(cls)
    return tuple(_flag_of(field, hints[field.name], docs.get(field.name, "")) for field in dataclasses.fields(cls))


def attribute_docs(cls: type) -> dict[str, str]:
    """Read the string literal after each attribute in the class's source, on one line."""
    definition = next(n for n in _source(cls.__module__).body if isinstance(n, ast.ClassDef) and n.name == cls.__name__)
    return {
        attribute.target.id: " ".join(text.value.value.split())
        for attribute, text in zip(definition.body, definition.body[1:], strict=False)
        if isinstance(attribute, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


@functools.cache
def _source(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[module]))


def _flag_of(field: dataclasses.Field, hint: Any, help_text: str) -> Flag:
    is_optional = get_origin(hint) in (Union, types.UnionType)
    kind = next(member for member in get_args(hint) if member is not types.NoneType) if is_optional else hint
    many = get_origin(kind) is tuple
    if many:
        kind = get_args(kind)[0]
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    return Flag(
        name=field.name,
        kind=type(choices[0]) if choices else kind,
        many=many,
        choices=choices,
        default=field.default,
        help=help_text,
        **field.metadata,
    )


def without_effect(config: RLConfig, names: Iterable[str], what: str) -> Iterator[Finding]:
    """Report each flag of ``names`` that the user typed and that nobody reads without ``what``."""
    return ((name, f"has no effect without {what}") for name in names if name in config.typed)


def listed(choices: Sequence[Any]) -> str:
    """Join the values in words: ``1, 2 or 4``."""
    *head, last = map(str, choices)
    return f"{', '.join(head)} or {last}" if head else last


def divisors(value: int) -> str:
    """List the divisors: ``10`` -> ``1, 2, 5 or 10``."""
    return listed(_divisors(value))


def nearest_divisors(value: int, wanted: int) -> str:
    """Name the nearest divisors: ``(32, 12)`` -> ``8 or 16``; above ``value`` only ``value`` itself."""
    found = _divisors(value)
    return listed([n for n in found if n <= wanted][-1:] + [n for n in found if n > wanted][:1])


def nearest_multiples(value: int, divisor: int) -> str:
    """Name the nearest multiples: ``(4100, 8)`` -> ``4096 or 4104``; below the divisor only the divisor itself."""
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below else f"{divisor}"


def _divisors(value: int) -> list[int]:
    """In order; in pairs, because a rollout may have millions of samples."""
    small = [n for n in range(1, math.isqrt(value) + 1) if value % n == 0]
    return sorted({*small, *(value // n for n in small)})
