"""How the commands that take a MODEL begin: help, flags, ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from megatron_rl.cli.ranks import read_ranks
from megatron_rl.errors import ConfigError, MegatronRLError
from megatron_rl.main import CONFIGURATION_ERROR, RUN_ERROR, refuse
from megatron_rl.metrics.logging import configure_logging
from megatron_rl.user_files import path_refusal

Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class ModelCommand(Generic[Parsed]):
    """One of them. It runs in this process, or on the ranks that it launches."""

    name: str
    """That of its module, too."""
    usage: str
    parse: Callable[[Sequence[str], int], Parsed]
    """(words, world size) -> what it needs; raises ConfigError."""
    run: Callable[[Parsed], int]

    def main(self, words: Sequence[str]) -> int:
        """0: done, or ended by the user; 1: failed; 2: wrong flags, prompts or files."""
        if {"-h", "--help"} & set(words):
            sys.stdout.write(self.usage)
            return 0
        _only_warnings()
        try:
            ranks, rest = read_ranks(words)
            if not rest or rest[0].startswith("-"):
                sys.stderr.write(self.usage)
                return CONFIGURATION_ERROR
            if refusal := path_refusal(rest[0]):
                raise ConfigError([f"MODEL {refusal}"])
            parsed = self.parse(rest, ranks.world_size)
        except ConfigError as error:
            return refuse(error.problems)
        if ranks.is_one:
            return _guarded(self.run, parsed)
        from megatron_rl.cli.launch import launch  # imports torch, which wrong flags need not wait for

        return launch(ranks, f"megatron_rl.cli.{self.name}:rank", rest, ["megatron-rl", self.name, *words])

    def rank(self, words: Sequence[str]) -> int:
        """The same on a rank that was launched: its words were found good."""
        _only_warnings()
        return _guarded(self.run, self.parse(words, int(os.environ["WORLD_SIZE"])))


def _guarded(run: Callable[[Parsed], int], parsed: Parsed) -> int:
    try:
        return run(parsed)
    except ConfigError as error:
        return refuse(error.problems, int(os.environ.get("RANK", "0")))
    except MegatronRLError as error:
        sys.stderr.write(f"{error}\n")
        return RUN_ERROR


def _only_warnings() -> None:
    configure_logging(rank=1)  # the screen belongs to the answers
