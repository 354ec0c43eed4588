"""The text of --help and --help-all."""

from __future__ import annotations

import textwrap

from megatron_rl.config.fields import Flag
from megatron_rl.config.rl_config import all_flags, section_classes

_WIDTH = 110
_INDENT = 6
_STARTS = (
    "torchrun --nproc-per-node=RANKS train_rl.py",
    "torchrun --nproc-per-node=RANKS -m megatron_rl.cli train",
    "megatron-rl train",
)
"""From a checkout, installed, and installed on one rank."""


def help_text(*, common_only: bool) -> str:
    """The common flags, or all of them, grouped by section."""
    lines = [f"usage: {start} [--config FILE] [--flag VALUE ...]" for start in _STARTS] + [""]
    for section, cls in section_classes().items():
        shown = [f for f in all_flags() if f.section == section and (f.declaration.common or not common_only)]
        if shown:
            lines += [f"{section}: {cls.__doc__.splitlines()[0]}"]
            lines += [line for flag in shown for line in _entry(flag)]
            lines += [""]
    if common_only:
        lines += [f"These are the common flags; --help-all lists all {len(all_flags())}."]
    return "\n".join(lines).rstrip() + "\n"


def _entry(flag: Flag) -> list[str]:
    value = "" if flag.kind is bool else f" {values_of(flag)}"
    pad = " " * _INDENT
    return [
        f"  {flag.spelling}{value}",
        *textwrap.wrap(_explanation(flag), _WIDTH, initial_indent=pad, subsequent_indent=pad),
    ]


def _explanation(flag: Flag) -> str:
    parts = [meaning_of(flag)]
    if other_spellings(flag):
        parts.append(f"Also {', '.join(other_spellings(flag))}.")
    if flag.note is not None:
        parts.append(f"No effect: {flag.note}.")
    elif default_of(flag):
        parts.append(f"Default: {default_of(flag)}.")
    return " ".join(parts)


def values_of(flag: Flag) -> str:
    """What may follow the flag: its choices, or the kind of value with its bounds."""
    if flag.kind is bool:
        return "(switch)"
    if flag.choices:
        return "{" + ",".join(str(choice) for choice in flag.choices) + "}"
    limits = flag.declaration
    bounds = [
        f"{sign} {bound}"
        for sign, bound in ((">=", limits.ge), (">", limits.gt), ("<=", limits.le), ("<", limits.lt))
        if bound is not None
    ]
    name = {int: "INT", float: "FLOAT", str: "TEXT"}[flag.kind] + (" ..." if flag.many else "")
    return f"{name} ({', '.join(bounds)})" if bounds else name


def default_of(flag: Flag) -> str:
    """The default as help shows it: empty for switches and where there is none."""
    if flag.kind is bool or flag.default is None or flag.default == ():
        return ""
    return str(flag.default)


def meaning_of(flag: Flag) -> str:
    """The field's docstring; for a flag that switches its field off, what it switches off; the names it takes."""
    if flag.declaration.off:
        return f"Switches off: {flag.help[:1].lower()}{flag.help[1:]}"
    if flag.declaration.names_of is None:
        return flag.help
    return f"{flag.help} There are: {', '.join(flag.declaration.names_of.names())}."


def other_spellings(flag: Flag) -> tuple[str, ...]:
    """Aliases with the same effect as the spelling shown."""
    declaration = flag.declaration
    return declaration.off_aliases if declaration.off else declaration.aliases
