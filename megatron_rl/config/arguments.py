"""Command line, YAML file and Hugging Face directory to ``RLConfig``, with every problem at once.

argparse is not used: it stops at the first problem, and it cannot name the nearest flag.
"""

from __future__ import annotations

import difflib
import functools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config.flags import Flag
from megatron_rl.config.hints import foreign_hint
from megatron_rl.config.rl_config import RLConfig, all_flags
from megatron_rl.config.saved import saved_model
from megatron_rl.errors import MAX_VALUE, Problem, collecting, cut, one_line, shorten
from megatron_rl.families import read_model
from megatron_rl.user_files import read_text

_LONGEST_FLAG = 100
"""No flag is that long, and looking for the nearest takes the square of the length."""
_LONGEST_FILE = 2**18
FILLED_IN = frozenset({"--num-layers", "--hidden-size", "--num-attention-heads", "--tokenizer-model"})
"""Flags without a default that a directory may replace."""


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
    derived: dict[str, Any] = field(default_factory=dict)
    """What a Hugging Face config.json or a checkpoint says and the user did not."""
    problems: list[Problem] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)
    file_is_lost: bool = False
    """Nothing could be read from the --config file."""
    repeated: tuple[str, ...] = ()
    """A line for each flag of the command line that has several values."""

    @property
    def config(self) -> RLConfig:
        """Defaults where nothing was said; not resolved."""
        return RLConfig(typed=self.values, repeated=self.repeated).with_values(**self.derived | self.values)

    def refuse(self, flag: str | None, text: str, is_unknown: bool = False) -> None:
        """Note a problem."""
        self.problems.append(Problem(flag, text, is_unknown))


def read_flags(argv: Sequence[str]) -> Reading:
    """What ``argv`` (without the program's name), its --config files and the directory of its model say."""
    for token, common_only in (("--help", True), ("-h", True), ("--help-all", False)):
        if token in argv:
            from megatron_rl.config.reference import help_text  # here, so that it can run as a program itself

            sys.stdout.write(help_text(common_only=common_only))
            raise SystemExit(0)
    reading = Reading()
    typed = _read_command_line(argv, reading)
    files = [s.texts[0] for s in typed if s.spelling == "config" and len(s.texts) == 1]
    for path in files:  # in order, so that the later one wins
        if _spellings()["config"][0].refusal(path) is None:  # else it is a problem below
            for setting in _read_yaml(path, reading):
                _apply(setting, reading)
    for setting in typed:  # after the files, so that the command line wins
        _apply(setting, reading)
    reading.repeated = tuple(_repeated(typed))
    reading.file_is_lost |= "--config" in reading.failed
    _read_directory(reading)
    if reading.values.get("eval_only") and "seed" not in reading.values:
        reading.derived |= _seed_of_run(reading)
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
    known = _spellings().get(setting.spelling)
    if known is None:
        reading.refuse(None, f"{setting.where} is not a flag; {_hint(setting)}", is_unknown=True)
        return
    flag, switches_on = known
    try:
        reading.values[flag.name] = value_of(flag, switches_on, setting.texts, setting.from_file)
    except ValueError as error:
        reading.refuse(flag.spelling, f"{setting.where} {error}")
        reading.failed.add(flag.spelling)


def _repeated(typed: Sequence[Setting]) -> Iterator[str]:
    given: dict[str, dict[str, None]] = {}
    for setting in typed:
        known = _spellings().get(setting.spelling)
        if known is not None and known[0].name != "config":  # whose files all count
            words = given.setdefault(known[0].name, {})
            written = cut(" ".join((setting.where, *setting.texts)), MAX_VALUE)
            words.pop(written, None)
            words[written] = None
    for *earlier, last in filter(lambda words: len(words) > 1, given.values()):
        yield f"{last} holds, which comes after {' and '.join(earlier)}"


def _hint(setting: Setting) -> str:
    dashes = "" if setting.from_file else "--"
    foreign = _translation(setting.spelling, " ".join(setting.texts), dashes)
    if foreign is not None:
        return foreign
    if "." in setting.spelling:  # none of ours has a dot, and what is near verl's means another thing
        return "--help-all lists all flags"
    near = difflib.get_close_matches(setting.spelling[:_LONGEST_FLAG], _spellings(), n=1, cutoff=0.7)
    return f"did you mean {dashes}{near[0]}?" if near else "--help-all lists all flags"


def _translation(spelling: str, value: str, dashes: str = "--") -> str | None:
    """What to do about a setting of TRL or verl; None if it is none that is known."""
    hint = foreign_hint(spelling[:_LONGEST_FLAG], value[:_LONGEST_FLAG])
    if hint:
        return f"use {hint if dashes else hint.removeprefix('--')}"
    return None if hint is None else "docs/coming_from.md says why there is none"


def value_of(flag: Flag, switches_on: bool, texts: Sequence[str], from_file: bool = False) -> Any:
    """What ``texts`` say behind a spelling of the flag; ``ValueError`` says what is wrong with them."""
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


@functools.cache
def _spellings() -> dict[str, tuple[Flag, bool]]:
    """Every accepted spelling -> its flag, and whether it switches a boolean on."""
    return {text: (flag, on) for flag in all_flags() for text, on in flag.spellings.items()}


def _read_directory(reading: Reading) -> None:
    """What a model's directory says that the flags name and the user did not; and what contradicts it."""
    names = {"--load-hf": "load_hf", "--hf-config": "hf_config"}
    given = {flag: reading.values[name] for flag, name in names.items() if reading.values.get(name)}
    problems: list[Problem] = []
    if len(set(map(os.path.realpath, given.values()))) > 1:
        both = " and ".join(f"{flag} {directory}" for flag, directory in given.items())
        problems.append(Problem("--hf-config", f"{both} both say what the model is; keep one of them"))
    elif given:
        flag, directory = next(iter(given.items()))
        with collecting(problems, flag):
            model = read_model(directory)
            settings = model.architecture.settings()
            problems += _contradictions(reading.values, settings, f"{directory}/config.json")
            settings["group_query_attention"] = True  # megatron ignores the number of groups without it
            if (model.directory / "tokenizer_config.json").is_file():
                settings["tokenizer_model"] = str(model.directory)
            reading.derived = {name: value for name, value in settings.items() if name not in reading.values}
    else:
        problems += _read_checkpoint(reading)
    if (problems and not reading.derived) or reading.failed & set(names):
        reading.failed |= FILLED_IN  # to call them missing too would repeat the problem
    reading.problems += problems


def _read_checkpoint(reading: Reading) -> list[Problem]:
    """The same of --load or --pretrained-checkpoint, where they are ours.

    Flags that shape the weights are compared once the checkpoint is looked at, see `architecture_problems`.
    """
    given = _checkpoints(reading)
    saved = next(filter(None, map(saved_model, given.values())), None)
    if saved is None:
        return _unsaid(reading, given)
    file, shape, others, _ = saved
    settings = shape | others | {"group_query_attention": True}  # megatron ignores the groups without it
    reading.derived = {name: value for name, value in settings.items() if name not in reading.values}
    problems = [*_contradictions(reading.values, others, str(file))]
    tokenizer = reading.derived.get("tokenizer_model", "")
    if Path(tokenizer).is_absolute() and not Path(tokenizer).exists():
        del reading.derived["tokenizer_model"]
        reading.failed.add("--tokenizer-model")
        text = f"{file} was saved with the tokenizer {tokenizer}, which is gone; name one with --tokenizer-model DIR"
        problems.append(Problem("--tokenizer-model", text))
    return problems


def _checkpoints(reading: Reading) -> dict[str, str]:
    return {name: reading.values[name] for name in ("load", "pretrained_checkpoint") if reading.values.get(name)}


def _seed_of_run(reading: Reading) -> dict[str, int]:
    """That of the run that saved the weights: with another one they would give other answers to held-out tasks."""
    saved = filter(None, map(saved_model, _checkpoints(reading).values()))
    return next(({"seed": seed} for *_, seed in saved), {})


def _unsaid(reading: Reading, given: Mapping[str, str]) -> list[Problem]:
    """One line in place of one for each flag that the checkpoint does not make up for."""
    missing = [name for name in sorted(FILLED_IN) if name.removeprefix("--").replace("-", "_") not in reading.values]
    if not given or not missing:
        return []
    name, path = next(iter(given.items()))
    flag = f"--{name.replace('_', '-')}"
    reading.failed |= FILLED_IN
    text = (
        f"{flag} {path} does not say what its model is, as Megatron-LM's checkpoints and those of earlier versions do "
        f"not; add --hf-config DIR with the model's config.json, or {', '.join(missing)} and what else it was made with"
    )
    return [Problem(flag, text)]


def _contradictions(typed: Mapping[str, Any], settings: Mapping[str, Any], source: str) -> Iterator[Problem]:
    for flag in all_flags():
        # How fresh weights are drawn is up to the run; a tokenizer may lie elsewhere, and is compared by its size.
        if flag.name not in typed or flag.name not in settings or flag.name in ("init_method_std", "tokenizer_model"):
            continue
        wanted, found = typed[flag.name], settings[flag.name]
        fits = wanted <= found if flag.name == "max_position_embeddings" else wanted == found
        if not fits:
            yield Problem(
                flag.spelling,
                f"{flag.typed(wanted)} contradicts {source}, which means {flag.typed(found)}; leave the flag "
                "out, or take another model",
            )
