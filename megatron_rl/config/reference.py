"""The flags described: --help, --help-all, and docs/flags.md.

``python -m megatron_rl.config.reference`` writes the page; with ``--check`` it says whether the page is up to date.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_rl.config.flags import Flag, flags_of
from megatron_rl.config.no_effect import no_effect
from megatron_rl.config.rl_config import all_flags, section_classes

REFERENCE = Path(__file__).parents[2] / "docs" / "flags.md"
_WIDTH = 110
_INDENT = 6 * " "
_HANGING = {"initial_indent": "  ", "subsequent_indent": _INDENT}
_STARTS = ("megatron-rl train --nproc RANKS", "torchrun --nproc-per-node=RANKS train_rl.py")
_OF_MODEL = ("model", "layers", "latent", "delta", "experts", "rotation")
"""Sections that describe a model."""
_HEADER = """# Flags

Written by `python -m megatron_rl.config.reference` from the sections in `megatron_rl/config/`; do not edit.

In a `--config` file, `--seq-length 4096` is `seq-length: 4096` or `seq_length: 4096`; the command line overrides the
file. In code it is `config.training.seq_length`. Every switch can be turned off with `--no-`, for example
`--no-sequence-parallel`. The last table has Megatron's flags that change nothing here.
"""


def help_text(*, common_only: bool, starts: Sequence[str] = _STARTS, about: str = "", own: Sequence[str] = ()) -> str:
    """Write the help of a command: how it ``starts``, what it is ``about``, its ``own`` fields, and flags."""
    lines = [f"usage: {start} [--config FILE] [--flag VALUE ...]" for start in starts] + [""]
    lines += [f"{about[:1].upper()}{about[1:]}.", ""] if about else []
    if own:
        lines += ["for this command:", *(line for flag in all_flags() if flag.name in own for line in _entry(flag)), ""]
    for section, about, flags in _sections():
        shown = [flag for flag in flags if flag.common or not common_only]
        if shown:
            lines += [f"{section}: {about}", *(line for flag in shown for line in _entry(flag)), ""]
    if common_only:
        lines += [f"These are the common flags; --help-all lists all {len(all_flags())}."]
    else:
        lines += ["Megatron's flags without effect:"]
        for row in dict.fromkeys(no_effect().values()):
            lines += textwrap.wrap(f"{', '.join(row.spellings)} ({row.values}): {row.why}", _WIDTH, **_HANGING)
    return "\n".join(lines).rstrip().replace("``", "") + "\n"  # of docstrings; a terminal shows them as they are


def _sections() -> Iterator[tuple[str, str, list[Flag]]]:
    """Yield name, meaning and flags; a model's, which its config.json says, are one section, the last."""
    of_model: list[Flag] = []
    for section, cls in section_classes().items():
        if section in _OF_MODEL:
            of_model += flags_of(cls)
        else:
            yield section, cls.__doc__.splitlines()[0], [*flags_of(cls)]
    yield "model", "The model's architecture, with Megatron's names; --load-hf reads it from config.json.", of_model


def _entry(flag: Flag) -> list[str]:
    default = f" Default: {_default(flag)}." if _default(flag) else ""
    text = f"{_meaning(flag)}{default}"
    value = "" if flag.kind is bool else f" {_values(flag)}"
    return [
        f"  {flag.spelling}{value}",
        *textwrap.wrap(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT),
    ]


def reference_text() -> str:
    """Return the whole page."""
    lines = [_HEADER]
    for section, about, flags in _sections():
        lines += [f"## {section}", "", about, ""]
        lines += ["| Flag | Values | Default | Meaning |", "|---|---|---|---|", *map(_row, flags), ""]
    lines += ["## Without effect", "", "| Flag | Values | Why |", "|---|---|---|"]
    for row in dict.fromkeys(no_effect().values()):
        lines.append(f"| {', '.join(f'`{text}`' for text in row.spellings)} | {row.values} | {row.why} |")
    return "\n".join(lines) + "\n"


def _row(flag: Flag) -> str:
    values = ", ".join(f"`{choice}`" for choice in flag.choices) or _values(flag)
    default = f"`{_default(flag)}`" if _default(flag) else ""
    return f"| `{flag.spelling}` | {values} | {default} | {_meaning(flag, quote='`')} |"


def _values(flag: Flag) -> str:
    """Write the choices of a flag, or the kind of value with its bounds."""
    if flag.kind is bool:
        return "switch"
    if flag.choices:
        return "{" + ",".join(map(str, flag.choices)) + "}"
    signs = ((">=", flag.ge), (">", flag.gt), ("<=", flag.le), ("<", flag.lt))
    bounds = ", ".join(f"{sign} {bound}" for sign, bound in signs if bound is not None)
    name = {int: "INT", float: "FLOAT", str: "TEXT"}[flag.kind] + (" ..." if flag.many else "")
    return f"{name} ({bounds})" if bounds else name


def _default(flag: Flag) -> str:
    """Empty for switches and where there is none."""
    default = " ".join(map(str, flag.default or ())) if flag.many else flag.default
    return "" if flag.kind is bool or default is None else str(default)


def _meaning(flag: Flag, quote: str = "") -> str:
    """Write the field's docstring, or what the flag switches off, with names of extensions and other spellings."""
    text = f"Turns off: {flag.help[:1].lower()}{flag.help[1:]}" if flag.off else flag.help
    if flag.names_of is not None:
        text += f" Available: {', '.join(flag.names_of.names())}."
    aliases = flag.off_aliases if flag.off else flag.aliases
    others = []
    for each in aliases:
        names = (each,) if isinstance(each, str) else (each.spelling, *each.aliases)
        values = "" if isinstance(each, str) or each.kind is bool else f" {_values(each)}"
        others.append(" or ".join(f"{quote}{name}{quote}" for name in names) + values)
    return f"{text} Also {', '.join(others)}." if others else text


def main(argv: Sequence[str]) -> int:
    """Write the page, or with --check return 1 if it is not up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is stale")
    parser.add_argument("--output", type=Path, default=REFERENCE, help="the page")
    arguments = parser.parse_args(argv)
    text = reference_text()
    if not arguments.check:
        arguments.output.write_text(text, encoding="utf-8")
        print(f"wrote {arguments.output}: {len(all_flags())} flags")
        return 0
    if arguments.output.exists() and arguments.output.read_text(encoding="utf-8") == text:
        return 0
    print(f"{arguments.output} is stale; run python -m megatron_rl.config.reference")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
