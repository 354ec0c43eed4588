"""Where settings are written: the command line and the YAML file. Splits text, judges nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from megatron_rl.errors import Problem, one_line, shorten

_LONGEST_FILE = 2**18


@dataclass(frozen=True)
class Setting:
    """One flag as written, for example ``--lr 1e-6`` or line 3 of a file, ``lr: 1e-6``."""

    where: str
    """What messages call it: ``--lr`` or ``run.yaml line 3: lr``."""
    spelling: str
    """Without dashes in front, and with dashes for underscores."""
    texts: tuple[str, ...]
    from_file: bool = False


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
