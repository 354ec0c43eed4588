"""Writes docs/flags.md from the sections: ``python -m megatron_rl.config.reference [--check]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config.fields import Flag
from megatron_rl.config.help import default_of, meaning_of, other_spellings, values_of
from megatron_rl.config.rl_config import all_flags, section_classes

REFERENCE = Path(__file__).parents[2] / "docs" / "flags.md"

_HEADER = """# Flags

Written by `python -m megatron_rl.config.reference` from the sections in `megatron_rl/config/`; do not edit.

A flag `--num-layers` is `config.model.num_layers`. In a `--config` file it is `num-layers: 64` or
`num_layers: 64`, and the command line wins. Every switch has an opposite with or without `no-`
(`--no-sequence-parallel`), so that the command line can undo a file. **No effect** marks Megatron flags
that are accepted, with a note when used, because they have no meaning here.
"""


def reference_text() -> str:
    """The whole page."""
    return "\n".join([_HEADER, *(_section(name, cls) for name, cls in section_classes().items())])


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
    current = arguments.output.read_text(encoding="utf-8") if arguments.output.exists() else ""
    if current == text:
        return 0
    print(f"{arguments.output} is stale; run python -m megatron_rl.config.reference")
    return 1


def _section(name: str, cls: type) -> str:
    rows = [_row(flag) for flag in all_flags() if flag.section == name]
    return "\n".join([
        f"## {name}",
        "",
        cls.__doc__.splitlines()[0],
        "",
        "| Flag | Values | Default | Meaning |",
        "|---|---|---|---|",
        *rows,
        "",
    ])


def _row(flag: Flag) -> str:
    others = [f"`{alias}`" for alias in other_spellings(flag)]
    meaning = meaning_of(flag)
    if others:
        meaning += f" Also {', '.join(others)}."
    if flag.note is not None:
        meaning += f" **No effect:** {flag.note}."
    default = f"`{default_of(flag)}`" if default_of(flag) else ""
    return f"| `{flag.spelling}` | {_values(flag)} | {default} | {meaning} |"


def _values(flag: Flag) -> str:
    if flag.choices:
        return ", ".join(f"`{choice}`" for choice in flag.choices)
    return values_of(flag).replace("(switch)", "switch")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
