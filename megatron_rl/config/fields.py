"""A configuration field that is also a flag: what is declared beside the default, and how it is read back.

A section is a frozen dataclass; each of its fields is one flag::

    lr: float | None = flag(None, gt=0, common=True)
    \"\"\"Peak learning rate.\"\"\"

gives ``--lr``, a float above 0, shown by ``--help`` with the docstring as its text.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from megatron_rl.registry import Registry

_METADATA_KEY = "flag"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declaration:
    """What a field says about its flag beyond name, type and default."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    off: str | None = None
    """The flag that switches a field off which is on by default: ``--disable-bias-linear``."""
    aliases: tuple[str, ...] = ()
    """Further spellings with the same meaning as the field's name."""
    off_aliases: tuple[str, ...] = ()
    """Further spellings of ``off``."""
    path: bool = False
    """A file or directory: its name must be one that a file system takes."""
    common: bool = False
    """Shown by ``--help`` and not only by ``--help-all``."""
    names_of: Registry | None = None
    """The extensions that it names; help lists them."""
    note: str | None = None
    """Why the flag is accepted but has no effect; printed when it is used, so that it is never silent."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag of one section, as the parser, the help and the reference see it."""

    section: str
    name: str
    """Field name: ``config.<section>.<name>``."""
    kind: type
    """``int``, ``float``, ``str`` or ``bool``; of the items where ``many``."""
    optional: bool
    many: bool
    choices: tuple[Any, ...]
    default: Any
    help: str
    declaration: Declaration

    @property
    def spelling(self) -> str:
        """How help and messages write it, dashes included."""
        return self.declaration.off or f"--{self.name.replace('_', '-')}"

    @property
    def spellings(self) -> dict[str, bool]:
        """Every accepted spelling, without dashes; False where it switches a boolean off.

        Each boolean has both ways, so that the command line can undo what a YAML file switched on.
        """
        on = self.name.replace("_", "-")
        spellings = {on: True} | {alias.removeprefix("--"): True for alias in self.declaration.aliases}
        if self.kind is bool:
            off = (self.declaration.off or _opposite(on), *self.declaration.off_aliases)
            spellings |= {text.removeprefix("--"): False for text in off}
        return spellings

    @property
    def note(self) -> str | None:
        """Why the flag has no effect here, if it has none."""
        return self.declaration.note


def flag(default: Any, **declared: Any) -> Any:
    """A dataclass field with a flag's metadata; ``declared`` are the attributes of ``Declaration``."""
    return dataclasses.field(default=default, metadata={_METADATA_KEY: Declaration(**declared)})


def flags_of(section: str, cls: type) -> tuple[Flag, ...]:
    """The flags of one section class, in the order they are written."""
    hints = get_type_hints(cls)
    docs = attribute_docs(cls)
    return tuple(
        _flag_of(section, field, hints[field.name], docs.get(field.name, ""))
        for field in dataclasses.fields(cls)
    )


def attribute_docs(cls: type) -> dict[str, str]:
    """The string literal that follows each attribute in the class's source, on one line."""
    tree = ast.parse(inspect.getsource(sys.modules[cls.__module__]))
    (definition,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == cls.__name__]
    docs = {}
    for attribute, text in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(attribute, ast.AnnAssign) and _is_string(text):
            docs[attribute.target.id] = " ".join(text.value.value.split())
    return docs


def _flag_of(section: str, field: dataclasses.Field, hint: Any, help_text: str) -> Flag:
    kind, optional = _without_none(hint)
    many = get_origin(kind) is tuple
    if many:
        kind = get_args(kind)[0]
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    return Flag(
        section=section,
        name=field.name,
        kind=type(choices[0]) if choices else kind,
        optional=optional,
        many=many,
        choices=choices,
        default=field.default,
        help=help_text,
        declaration=field.metadata.get(_METADATA_KEY, Declaration()),
    )


def _without_none(hint: Any) -> tuple[Any, bool]:
    """``int | None`` -> (int, True); ``int`` -> (int, False)."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    (kind,) = [member for member in get_args(hint) if member is not types.NoneType]
    return kind, True


def _opposite(spelling: str) -> str:
    return spelling.removeprefix("no-") if spelling.startswith("no-") else f"no-{spelling}"


def _is_string(node: ast.stmt) -> bool:
    literal = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return literal and isinstance(node.value.value, str)
