"""Command line and YAML file to ``RLConfig``, with every problem in one error.

argparse is not used: it stops at the first problem, and it cannot name the nearest flag.
"""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.checks import resolve, validate
from megatron_rl.config.flags import Flag
from megatron_rl.config.hugging_face import FILLED_IN, hugging_face_values
from megatron_rl.config.rl_config import RLConfig, all_flags
from megatron_rl.config.sources import Setting, read_command_line, read_yaml
from megatron_rl.errors import MAX_PROBLEMS, ConfigError, Problem, shorten

_LONGEST_FLAG = 100


def read_config(argv: Sequence[str], world_size: int) -> tuple[RLConfig, list[Problem]]:
    """Parse, resolve and validate: the configuration and every problem of all three, to which a caller adds its own.

    With problems the configuration holds what could be read and is good for looking up paths and names.
    """
    reading = _read(argv)
    config = resolve(_build(reading), world_size)
    if reading.file_is_lost:  # what it would have set is not missing
        return config, reading.problems
    broken = validate(config, world_size)  # without what only repeats that a value could not be read
    return config, [*reading.problems, *(problem for problem in broken if problem.flag not in reading.failed)]


def parse_config(argv: Sequence[str]) -> RLConfig:
    """What ``argv`` (without the program's name) and its --config file say; defaults elsewhere.

    Raises ``ConfigError`` with every unknown flag, wrong type, wrong choice and value out of bounds.
    ``--help`` and ``--help-all`` write the help and exit.
    """
    reading = _read(argv)
    if reading.problems:
        raise ConfigError(reading.problems)
    return _build(reading)


@dataclass
class _Reading:
    """Values by field name, what is wrong, and the flags whose value was lost to a problem."""

    values: dict[str, Any] = field(default_factory=dict)
    derived: dict[str, Any] = field(default_factory=dict)
    """What a Hugging Face config.json says and the user did not."""
    problems: list[Problem] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)
    file_is_lost: bool = False
    """Nothing could be read from the --config file."""


def _read(argv: Sequence[str]) -> _Reading:
    for token, common_only in (("--help", True), ("-h", True), ("--help-all", False)):
        if token in argv:
            from megatron_rl.config.reference import help_text  # here, so that it can run as a program itself

            sys.stdout.write(help_text(common_only=common_only))
            raise SystemExit(0)
    reading = _Reading()
    typed, problems = read_command_line(argv)
    reading.problems += problems
    files = [s.texts[0] for s in typed if s.spelling == "config" and len(s.texts) == 1]
    if files and _spellings()["config"][0].refusal(files[-1]) is None:  # else it is a problem below
        from_file, problems = read_yaml(files[-1])
        reading.problems += problems
        reading.file_is_lost = bool(problems) and not from_file
        for setting in from_file:
            _apply(setting, reading)
    for setting in typed:  # after the file, so that the command line wins
        _apply(setting, reading)
    reading.file_is_lost |= "--config" in reading.failed
    reading.derived, problems = hugging_face_values(reading.values)
    reading.problems += problems
    if (problems and not reading.derived) or reading.failed & {"--load-hf", "--hf-config"}:
        reading.failed |= FILLED_IN  # to call them missing too would repeat the problem
    return reading


def _apply(setting: Setting, reading: _Reading) -> None:
    known = _spellings().get(setting.spelling)
    if known is None:
        # what is not shown needs no comparison with every flag, which would take half a minute for 5000 of them
        is_shown = len(reading.problems) < MAX_PROBLEMS
        reading.problems.append(Problem(None, _unknown(setting, _nearest(setting) if is_shown else None)))
        return
    flag, switches_on = known
    try:
        reading.values[flag.name] = _value(flag, switches_on, setting)
    except ValueError as error:
        reading.problems.append(Problem(flag.spelling, f"{setting.where} {error}"))
        reading.failed.add(flag.spelling)


def _value(flag: Flag, switches_on: bool, setting: Setting) -> Any:
    texts = setting.texts
    if setting.from_file and flag.name == "config":
        raise ValueError("cannot name another file; put its settings here")
    if flag.kind is bool and not setting.from_file:
        if texts:
            raise ValueError(f"takes no value, got {shorten(' '.join(texts))}")
        return switches_on
    if flag.many:
        if not texts and not setting.from_file:
            raise ValueError("needs at least one value")
        return tuple(map(flag.convert, texts))
    if not texts:
        raise ValueError("needs a value")
    if len(texts) > 1:
        raise ValueError(f"takes one value, got {len(texts)}: {shorten(' '.join(texts))}")
    value = flag.convert(texts[0])
    return value == switches_on if flag.kind is bool else value


def _unknown(setting: Setting, nearest: str | None) -> str:
    dashes = "" if setting.from_file else "--"
    hint = f"did you mean {dashes}{nearest}?" if nearest else "--help-all lists all flags"
    return f"{setting.where} is not a flag; {hint}"


def _nearest(setting: Setting) -> str | None:
    # no flag is that long, and the comparison takes the square of the length
    near = difflib.get_close_matches(setting.spelling[:_LONGEST_FLAG], _spellings(), n=1, cutoff=0.7)
    return near[0] if near else None


@functools.cache
def _spellings() -> dict[str, tuple[Flag, bool]]:
    """Every accepted spelling -> its flag, and whether it switches a boolean on."""
    return {text: (flag, on) for flag in all_flags() for text, on in flag.spellings.items()}


def _build(reading: _Reading) -> RLConfig:
    return RLConfig(typed=reading.values).with_values(**reading.derived | reading.values)
