"""The flags that a sub-command has for itself, those of the launcher among them; the other words are the run's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from megatron_rl.config.arguments import value_of
from megatron_rl.config.flags import flag, flags_of
from megatron_rl.errors import ConfigError, Problem

T = TypeVar("T")


def take(options: type[T], words: Sequence[str]) -> tuple[T, list[str]]:
    """Return what ``words`` say of the fields of ``options``, a dataclass of flags; and the other words.

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
        texts = [text] if equals else []
        while known.kind is not bool and rest and not rest[0].startswith("--") and (known.many or not texts):
            texts.append(rest.pop(0))
        try:
            values[known.name] = value_of(known, on, texts)
        except ValueError as error:
            problems.append(Problem(name, f"{name} {error}"))
    if problems:
        raise ConfigError(problems)
    return options(**values), others


def described(options: type) -> str:
    """Describe each flag in a line, for a help."""
    values = {each: "" if each.kind is bool else f" {each.name.upper()}" for each in flags_of(options)}
    shown = [(f"{each.spelling}{value}", each) for each, value in values.items()]
    width = max(len(name) for name, _ in shown)
    return "".join(f"  {name:<{width}}  {each.help}\n" for name, each in shown)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The number of ranks that a command starts, and their machines, in torchrun's words."""

    nproc: int = flag(1, ge=1, le=1024, aliases=("--nproc-per-node",))
    """Ranks on this machine, one a GPU."""
    nnodes: int = flag(1, ge=1, le=100_000)
    """Machines; the command is started on each of them."""
    node_rank: int = flag(0, ge=0)
    """Number of this machine."""
    master_addr: str | None = flag(None)
    """Name or address of machine 0."""
    master_port: int = flag(29500, ge=1, le=65535)
    """Port of machine 0 on which the machines find each other."""
    max_restarts: int = flag(0, ge=0, le=1000)
    """How often all ranks are started again after one of them failed; needs --resume."""

    @property
    def world_size(self) -> int:
        """The number of all ranks of the job."""
        return self.nproc * self.nnodes

    @property
    def is_one(self) -> bool:
        """Nothing is to be launched: this process is the job."""
        return self.world_size == 1 and self.max_restarts == 0


def read_ranks(words: Sequence[str]) -> tuple[Ranks, list[str]]:
    """Return what ``words`` say of ranks, and the other words.

    Raises:
        ConfigError: names every value that cannot be.
    """
    ranks, others = take(Ranks, words)
    problems = []
    if ranks.node_rank >= ranks.nnodes:
        text = f"--node-rank {ranks.node_rank} is not below --nnodes {ranks.nnodes}; machines are numbered from 0"
        problems.append(Problem("--node-rank", text))
    if ranks.nnodes > 1 and not ranks.master_addr:
        problems.append(Problem("--master-addr", "--master-addr is missing: give the name or address of machine 0"))
    if problems:
        raise ConfigError(problems)
    return ranks, others
