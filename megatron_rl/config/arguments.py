"""Command line, YAML file and Hugging Face directory to ``RLConfig``, with every problem at once.

argparse is not used: it stops at the first problem, and it cannot name the nearest flag.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import yaml

from megatron_rl.config.flags import Added, Flag, Second
from megatron_rl.config.model_directory import read_adapter_directory, read_model_directory
from megatron_rl.config.no_effect import NoEffect, no_effect
from megatron_rl.config.rl_config import RLConfig, all_spellings, resolve
from megatron_rl.config.rules import validate
from megatron_rl.errors import MAX_VALUE, Problem, cut, one_line, shorten
from megatron_rl.user_files import read_text

_LONGEST_FLAG = 100
"""No flag is that long, and looking for the nearest takes the square of the length."""
_LONGEST_FILE = 2**18
FOREIGN_FLAGS = files(__package__) / "foreign_flags.txt"


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
class Reading:
    """Values by field name, what is wrong, and the flags whose value was lost to a problem."""

    values: dict[str, Any] = field(default_factory=dict)
    added: dict[tuple[str, str], Added] = field(default_factory=dict)
    """Items of tuples, by field and second spelling."""
    derived: dict[str, Any] = field(default_factory=dict)
    """What a Hugging Face config.json or a checkpoint says and the user did not."""
    no_effect: dict[NoEffect, tuple[str, ...]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)
    file_is_lost: bool = False
    """Nothing could be read from the --config file."""
    repeated: tuple[str, ...] = ()
    """A line for each flag of the command line that has several values."""

    @property
    def config(self) -> RLConfig:
        """Defaults where nothing was said; not resolved."""
        config = RLConfig(typed=self.values, no_effect=self.no_effect, repeated=self.repeated)
        return config.with_values(**self.derived | self.values)

    def take(self, flag: Flag, value: Any) -> None:
        """Set the field of a flag, or what a value of a second spelling stands for."""
        if not isinstance(flag, Second):
            self.values[flag.name] = value
            return
        for name, meant in flag.sets(value).items():
            if isinstance(meant, Added):
                self.added[name, flag.name] = meant
            elif value is not False:
                self.values[name] = meant
            elif self.values.get(name) == meant:  # a file switched it on
                del self.values[name]
            if value is False:
                self.added.pop((name, flag.name), None)

    def finish(self) -> None:
        """Put the items of second spellings before those of the field's own, which hold where both set an option."""
        order = [flag.name for flag, _ in all_spellings().values()]
        for name, second in sorted(self.added, key=lambda key: order.index(key[1]), reverse=True):
            self.values[name] = (str(self.added[name, second]), *self.values.get(name, ()))
        self.added.clear()

    def refuse(self, flag: str | None, text: str, is_unknown: bool = False) -> None:
        """Note a problem."""
        self.problems.append(Problem(flag, text, is_unknown))


def read_config(argv: Sequence[str], world_size: int) -> tuple[RLConfig, list[Problem]]:
    """Parse, resolve and validate: the configuration and every problem of all three, to which a caller adds its own.

    With problems the configuration holds what could be read and is good for looking up paths and names.
    ``--help`` and ``--help-all`` write the help and exit.
    """
    reading = read_flags(argv)
    config = resolve(reading.config, world_size)
    if reading.file_is_lost:  # what it would have set is not missing
        return config, reading.problems
    broken = validate(config, world_size)  # without what only repeats that a value could not be read
    return config, [*reading.problems, *(problem for problem in broken if problem.flag not in reading.failed)]


def read_flags(argv: Sequence[str]) -> Reading:
    """Return what ``argv`` (without the program's name), its --config files and the directory of its model say."""
    for token, common_only in (("--help", True), ("-h", True), ("--help-all", False)):
        if token in argv:
            from megatron_rl.config.reference import help_text  # here, so that it can run as a program itself

            sys.stdout.write(help_text(common_only=common_only))
            raise SystemExit(0)
    reading = Reading()
    typed = _read_command_line(argv, reading)
    files = [s.texts[0] for s in typed if s.spelling == "config" and len(s.texts) == 1]
    for path in files:  # in order, so that the later one wins
        if all_spellings()["config"][0].refusal(path) is None:  # else it is a problem below
            for setting in _read_yaml(path, reading):
                _apply(setting, reading)
    for setting in typed:  # after the files, so that the command line wins
        _apply(setting, reading)
    reading.finish()
    reading.repeated = tuple(_repeated(typed))
    reading.file_is_lost |= "--config" in reading.failed
    read_model_directory(reading)
    read_adapter_directory(reading)
    return reading


def _read_command_line(argv: Sequence[str], reading: Reading) -> list[Setting]:
    """In order. ``--flag a b`` and ``--flag=a`` are the two forms."""
    settings: list[Setting] = []
    for token in argv:
        if token.startswith("--"):
            name, equals, text = token.partition("=")
            settings.append(Setting(name, name.removeprefix("--"), (text,) if equals else ()))
        elif settings:
            last = settings.pop()
            settings.append(Setting(last.where, last.spelling, (*last.texts, token)))
        else:
            advice = _translation(*token.partition("=")[::2]) or "every value follows its flag"  # verl's have no dashes
            reading.refuse(None, f"{shorten(token)} stands before any flag; {advice}", is_unknown=True)
    return settings


def _read_yaml(path: str, reading: Reading) -> list[Setting]:
    """Settings of a flat mapping, with their lines.

    Values are taken as written, not as YAML reads them: YAML takes ``1e-6`` for text.
    """
    try:
        document = _compose(path)
    except ValueError as error:
        reading.file_is_lost = True
        reading.refuse("--config", f"--config {path} {error}")
        return []
    settings: list[Setting] = []
    seen: dict[str, int] = {}
    for key, value in document.value if document is not None else ():
        line = key.start_mark.line + 1
        where = f"{path} line {line}: {key.value}"
        spelling = str(key.value).replace("_", "-")
        if spelling in seen:
            reading.refuse(f"--{spelling}", f"{where} was already set in line {seen[spelling]}; keep one of them")
        seen.setdefault(spelling, line)
        items = value.value if isinstance(value, yaml.SequenceNode) else [value]
        if not all(isinstance(item, yaml.ScalarNode) for item in items):
            reading.refuse(f"--{spelling}", f"{where} is nested; the file is flat: flag names and their values")
        elif value.tag != "tag:yaml.org,2002:null":  # null leaves the default
            settings.append(Setting(where, spelling, tuple(item.value for item in items), from_file=True))
    return settings


def _compose(path: str) -> yaml.MappingNode | None:
    """The document, None where the file is empty; ``ValueError`` says what is wrong with the file."""
    try:
        text = read_text(path, _LONGEST_FILE)
    except ValueError as error:
        raise ValueError(f"{error}; give a file of flags and values") from error
    try:
        document = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"is not YAML: {one_line(str(error))}") from error
    if not isinstance(document, yaml.MappingNode | None):
        raise ValueError("is not a mapping; write one 'flag-name: value' a line")
    return document


def _apply(setting: Setting, reading: Reading) -> None:
    known, row = all_spellings().get(setting.spelling), no_effect().get(setting.spelling)
    one_value = no_effect().get(" ".join((setting.spelling, *setting.texts)))
    if one_value is not None:
        reading.no_effect[one_value] = ()
        return
    if row is not None:
        if not (setting.from_file and setting.texts == ("false",)):  # a switch that is off
            reading.no_effect[row] = () if setting.from_file and row.is_switch else setting.texts
        return
    if known is None:
        reading.refuse(None, f"{setting.where} is not a flag; {_hint(setting)}", is_unknown=True)
        return
    flag, switches_on = known
    try:
        reading.take(flag, value_of(flag, switches_on, setting.texts, setting.from_file))
    except ValueError as error:
        reading.refuse(flag.spelling, f"{setting.where} {error}")
        reading.failed.add(flag.spelling)


def _repeated(typed: Sequence[Setting]) -> Iterator[str]:
    given: dict[tuple[str, str], dict[str, Any]] = {}
    for setting in typed:
        flag, switches_on = all_spellings().get(setting.spelling, (None, True))
        if flag is None or flag.name == "config":  # whose files all count
            continue
        with contextlib.suppress(ValueError):  # already a problem
            value = value_of(flag, switches_on, setting.texts)
            written = cut(" ".join((setting.where, *setting.texts)), MAX_VALUE)
            for name, meant in flag.sets(value).items() if isinstance(flag, Second) else ((flag.name, value),):
                words = given.setdefault((name, flag.name if isinstance(meant, Added) else ""), {})
                words.pop(written, None)
                words[written] = meant
    for words in given.values():
        *earlier, last = words
        if any(words[each] != words[last] for each in earlier):
            yield f"{last} holds, which comes after {' and '.join(earlier)}"


def _hint(setting: Setting) -> str:
    dashes = "" if setting.from_file else "--"
    foreign = _translation(setting.spelling, " ".join(setting.texts), dashes)
    if foreign is not None:
        return foreign
    if "." in setting.spelling:  # none of ours has a dot, and what is near verl's means another thing
        return "--help-all lists all flags"
    known = (*all_spellings(), *no_effect())
    near = difflib.get_close_matches(setting.spelling[:_LONGEST_FLAG], known, n=1, cutoff=0.7)
    return f"did you mean {dashes}{near[0]}?" if near else "--help-all lists all flags"


def _translation(spelling: str, value: str, dashes: str = "--") -> str | None:
    """What to do about a setting of TRL or verl; None if it is none that is known."""
    name = spelling.lower().replace("-", "_").removeprefix("actor_rollout_ref.")
    hint = foreign_flags().get(f"{name}={value.lower()}", foreign_flags().get(name))
    if hint:
        return f"use {hint if dashes else hint.removeprefix('--')}"
    return None if hint is None else "docs/coming_from.md says why there is none"


@functools.cache
def foreign_flags() -> dict[str, str]:
    """Return our names of settings of TRL and verl, empty where there is none: the tables of coming_from.md.

    ``name=value`` is of that value alone; the first row of a name holds.
    """
    found: dict[str, str] = {}
    for names, _, ours, _ in table(FOREIGN_FLAGS):
        for name, use in zip(names, ours, strict=True):
            found.setdefault(name.lower(), use)
    return dict.fromkeys((name.partition("=")[0] for name in found), "") | found


def table(file: Traversable) -> Iterator[tuple[list[str], str, list[str], str]]:
    """Yield rows ``theirs | ours | note``: names, the sign between them, ours for each (empty for –), and the note."""
    for line in file.read_text(encoding="utf-8").splitlines():
        left, right, *note = line.split(" | ")
        sign = next((sign for sign in (" × ", " + ", " / ") if sign in left), ", ")
        names, ours = left.split(sign), right.replace("–", "").split(", ")
        yield names, sign, ours if len(ours) == len(names) else ours * len(names), "".join(note)


def value_of(flag: Flag, switches_on: bool, texts: Sequence[str], from_file: bool = False) -> Any:
    """Return what ``texts`` say behind a spelling of the flag; ``ValueError`` says what is wrong with them."""
    if from_file and flag.name == "config":
        raise ValueError("cannot name another file; put its settings here")
    if flag.kind is bool and not from_file:
        if texts:
            raise ValueError(f"takes no value, got {shorten(' '.join(texts))}")
        return switches_on
    if flag.many and (texts or from_file):
        return tuple(map(flag.convert, texts))
    if not texts:
        raise ValueError("needs at least one value" if flag.many else "needs a value")
    if len(texts) > 1:
        raise ValueError(f"takes one value, got {len(texts)}: {shorten(' '.join(texts))}")
    value = flag.convert(texts[0])
    return value == switches_on if flag.kind is bool else value

