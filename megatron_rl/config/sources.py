"""Where settings are written: the command line and the YAML file. Splits text, judges nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Setting:
    """One flag as written, for example ``--lr 1e-6`` or line 3 of a file, ``lr: 1e-6``."""

    where: str
    """What messages call it: ``--lr`` or ``run.yaml line 3: lr``."""
    spelling: str
    """Without dashes in front, and with dashes for underscores."""
    texts: tuple[str, ...]
    from_file: bool = False


def read_command_line(argv: Sequence[str]) -> tuple[list[Setting], list[str]]:
    """Settings in order, and problems. ``--flag a b`` and ``--flag=a`` are the two forms."""
    settings: list[Setting] = []
    problems: list[str] = []
    for token in argv:
        if token.startswith("--"):
            name, equals, text = token.partition("=")
            settings.append(Setting(name, name.removeprefix("--"), (text,) if equals else ()))
        elif settings:
            last = settings.pop()
            settings.append(Setting(last.where, last.spelling, (*last.texts, token)))
        else:
            problems.append(f"{token!r} stands before any flag; every value follows its flag")
    return settings, problems


def read_yaml(path: str) -> tuple[list[Setting], list[str]]:
    """Settings of a flat mapping, with their lines, and problems.

    Values are taken as written, not as YAML reads them: YAML takes ``1e-6`` for text.
    """
    try:
        document = yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        return [], [f"--config {path} cannot be read: {error.strerror}"]
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        return [], [f"--config {path} is not YAML: {' '.join(str(error).split())}"]
    if document is None:
        return [], []
    if not isinstance(document, yaml.MappingNode):
        return [], [f"--config {path} is not a mapping; write one 'flag-name: value' a line"]
    settings: list[Setting] = []
    problems: list[str] = []
    seen: dict[str, int] = {}
    for key, value in document.value:
        line = key.start_mark.line + 1
        where = f"{path} line {line}: {key.value}"
        spelling = str(key.value).replace("_", "-")
        if spelling in seen:
            problems.append(f"{where} was already set in line {seen[spelling]}; keep one of them")
        seen.setdefault(spelling, line)
        texts = _texts(value)
        if texts is None:
            problems.append(f"{where} is nested; the file is flat: flag names and their values")
        elif value.tag != "tag:yaml.org,2002:null":  # null leaves the default
            settings.append(Setting(where, spelling, texts, from_file=True))
    return settings, problems


def _texts(node: yaml.Node) -> tuple[str, ...] | None:
    """The scalars of a value: one, or those of a list; None if it is anything deeper."""
    items = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if not all(isinstance(item, yaml.ScalarNode) for item in items):
        return None
    return tuple(item.value for item in items)
