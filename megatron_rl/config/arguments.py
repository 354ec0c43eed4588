"""Command line, YAML file and Hugging Face directory to ``RLConfig``, with every problem at once.

argparse is not used: it stops at the first problem, and it cannot name the nearest flag.
"""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config.checks import resolve, validate
from megatron_rl.config.flags import Flag
from megatron_rl.config.rl_config import RLConfig, all_flags
from megatron_rl.errors import MAX_PROBLEMS, ConfigError, Problem, collecting, one_line, shorten
from megatron_rl.families import read_model

_LONGEST_FLAG = 100
_LONGEST_FILE = 2**18
_FREE = ("init_method_std",)
"""How fresh weights are drawn is up to the run."""
FILLED_IN = frozenset({"--num-layers", "--hidden-size", "--num-attention-heads", "--tokenizer-model"})
"""Flags without a default that a directory may replace."""


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


@dataclass(frozen=True)
class Setting:
    """One flag as written, for example ``--lr 1e-6`` or line 3 of a file, ``lr: 1e-6``."""

    where: str
    """What messages call it: ``--lr`` or ``run.yaml line 3: lr``."""
    spelling: str
    """Without dashes in front, and with dashes for underscores."""
    texts: tuple[str, ...]
    from_file: bool = False


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
        near = _nearest(setting) if len(reading.problems) < MAX_PROBLEMS else []
        dashes = "" if setting.from_file else "--"
        hint = f"did you mean {dashes}{near[0]}?" if near else "--help-all lists all flags"
        reading.problems.append(Problem(None, f"{setting.where} is not a flag; {hint}"))
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


def _nearest(setting: Setting) -> list[str]:
    # no flag is that long, and the comparison takes the square of the length
    return difflib.get_close_matches(setting.spelling[:_LONGEST_FLAG], _spellings(), n=1, cutoff=0.7)


@functools.cache
def _spellings() -> dict[str, tuple[Flag, bool]]:
    """Every accepted spelling -> its flag, and whether it switches a boolean on."""
    return {text: (flag, on) for flag in all_flags() for text, on in flag.spellings.items()}


def _build(reading: _Reading) -> RLConfig:
    return RLConfig(typed=reading.values).with_values(**reading.derived | reading.values)


def read_command_line(argv: Sequence[str]) -> tuple[list[Setting], list[Problem]]:
    """Settings in order, and problems. ``--flag a b`` and ``--flag=a`` are the two forms."""
    settings: list[Setting] = []
    problems: list[Problem] = []
    for token in argv:
        if token.startswith("--"):
            name, equals, text = token.partition("=")
            settings.append(Setting(name, name.removeprefix("--"), (text,) if equals else ()))
        elif settings:
            last = settings.pop()
            settings.append(Setting(last.where, last.spelling, (*last.texts, token)))
        else:
            problems.append(Problem(None, f"{shorten(token)} stands before any flag; every value follows its flag"))
    return settings, problems


def read_yaml(path: str) -> tuple[list[Setting], list[Problem]]:
    """Settings of a flat mapping, with their lines, and problems.

    Values are taken as written, not as YAML reads them: YAML takes ``1e-6`` for text.
    """
    try:
        document = _compose(path)
    except ValueError as error:
        return [], [Problem("--config", f"--config {path} {error}")]
    if document is None:
        return [], []
    if not isinstance(document, yaml.MappingNode):
        text = f"--config {path} is not a mapping; write one 'flag-name: value' a line"
        return [], [Problem("--config", text)]
    settings: list[Setting] = []
    problems: list[Problem] = []
    seen: dict[str, int] = {}
    for key, value in document.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            text = f"{path} line {line} has a {key.id} where a flag's name belongs; write 'flag-name: value'"
            problems.append(Problem(None, text))
            continue
        where = f"{path} line {line}: {key.value}"
        spelling = str(key.value).replace("_", "-")
        if spelling in seen:
            text = f"{where} was already set in line {seen[spelling]}; keep one of them"
            problems.append(Problem(f"--{spelling}", text))
        seen.setdefault(spelling, line)
        texts = _texts(value)
        if texts is None:
            text = f"{where} is nested; the file is flat: flag names and their values"
            problems.append(Problem(f"--{spelling}", text))
        elif value.tag != "tag:yaml.org,2002:null":  # null leaves the default
            settings.append(Setting(where, spelling, texts, from_file=True))
    return settings, problems


def _compose(path: str) -> yaml.Node | None:
    """The document, None where the file is empty; ``ValueError`` says what is wrong with the file."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(_LONGEST_FILE + 1)
        document = yaml.compose(text, Loader=yaml.SafeLoader) if len(text) <= _LONGEST_FILE else None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"is not YAML: {one_line(str(error))}") from error
    except RecursionError:
        raise ValueError("is nested too deeply; the file is flat: flag names and their values") from None
    if len(text) > _LONGEST_FILE:  # a device or a data set would be read until memory is full
        raise ValueError(f"has more than {_LONGEST_FILE} characters; give a file of flags and values")
    return document


def _texts(node: yaml.Node) -> tuple[str, ...] | None:
    """The scalars of a value: one, or those of a list; None if it is anything deeper."""
    items = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if not all(isinstance(item, yaml.ScalarNode) for item in items):
        return None
    return tuple(item.value for item in items)


def hugging_face_values(typed: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """By field name, what the directory says that the flags name and the user did not; and what contradicts it.

    There are no values where it cannot be read.
    """
    given = {f"--{name.replace('_', '-')}": typed[name] for name in ("load_hf", "hf_config") if typed.get(name)}
    if not given:
        return {}, []
    if len({Path(directory).resolve() for directory in given.values()}) > 1:
        both = " and ".join(f"{flag} {directory}" for flag, directory in given.items())
        return {}, [Problem("--hf-config", f"{both} both say what the model is; keep one of them")]
    (flag, directory), *_ = given.items()
    problems: list[Problem] = []
    settings: dict[str, Any] = {}
    with collecting(problems, flag):
        settings = read_model(directory).architecture.settings()
        problems += _contradictions(typed, settings, str(Path(directory) / "config.json"))
        settings["group_query_attention"] = True  # megatron ignores the number of groups without it
        if (Path(directory) / "tokenizer_config.json").is_file():
            settings["tokenizer_model"] = str(directory)
    return {name: value for name, value in settings.items() if name not in typed}, problems


def _contradictions(typed: Mapping[str, Any], settings: Mapping[str, Any], source: str) -> Iterator[Problem]:
    for flag in all_flags():
        if flag.name not in typed or flag.name not in settings or flag.name in _FREE:
            continue
        wanted, found = typed[flag.name], settings[flag.name]
        fits = wanted <= found if flag.name == "max_position_embeddings" else wanted == found
        if not fits:
            yield Problem(
                flag.spelling,
                f"{_as_typed(flag, wanted)} contradicts {source}, which means {_as_typed(flag, found)}; leave the flag "
                "out, or take another model",
            )


def _as_typed(flag: Flag, value: Any) -> str:
    if flag.kind is bool:
        return next(f"--{spelling}" for spelling, switches_on in flag.spellings.items() if switches_on == value)
    name = f"--{flag.name.replace('_', '-')}"
    return f"no {name}" if value is None else f"{name} {value}"
