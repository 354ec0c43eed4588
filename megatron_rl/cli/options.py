"""The flags that a sub-command has for itself, taken out of its words; the others are the run's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from megatron_rl.config.arguments import value_of
from megatron_rl.config.flags import flags_of
from megatron_rl.errors import ConfigError, Problem

T = TypeVar("T")


def take(options: type[T], words: Sequence[str]) -> tuple[T, list[str]]:
    """What ``words`` say of the fields of ``options``, a dataclass of flags; and the other words.

    Raises:
        ConfigError: names every value that cannot be.
    """
    spellings = {f"--{text}": (each, on) for each in flags_of(options) for text, on in each.spellings.items()}
    values, others, problems = {}, [], []
    rest = [*words]
    while rest:
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        known, on = spellings.get(name.replace("_", "-"), (None, True))
        if known is None:
            others.append(word)
            continue
        takes_next = known.kind is not bool and rest and not rest[0].startswith("--")
        texts = (text,) if equals else (rest.pop(0),) if takes_next else ()
        try:
            values[known.name] = value_of(known, on, texts)
        except ValueError as error:
            problems.append(Problem(name, f"{name} {error}"))
    if problems:
        raise ConfigError(problems)
    return options(**values), others


def described(options: type) -> str:
    """For a help: a line for each flag."""
    values = {each: "" if each.kind is bool else f" {each.name.upper()}" for each in flags_of(options)}
    shown = [(f"{each.spelling}{value}", each) for each, value in values.items()]
    width = max(len(name) for name, _ in shown)
    return "".join(f"  {name:<{width}}  {each.help}\n" for name, each in shown)
