"""How the commands that take a MODEL begin: help, flags, ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from megatron_rl.cli.ranks import read_ranks
from megatron_rl.errors import ConfigError, MegatronRLError
from megatron_rl.main import CONFIGURATION_ERROR, RUN_ERROR, refuse
from megatron_rl.metrics.logging import configure_logging

Parsed = TypeVar("Parsed")
Parse = Callable[[Sequence[str], int], Parsed]
"""(words, world size) -> what the command needs; raises ConfigError."""


def start(
    command: str, words: Sequence[str], usage: str, parse: Parse[Parsed], run: Callable[[Parsed], int], entry: str
) -> int:
    """The exit code of ``run`` here, or of ``entry``, "module:function" of the words, on several ranks."""
    if {"-h", "--help"} & set(words):
        sys.stdout.write(usage)
        return 0
    _only_warnings()
    try:
        ranks, rest = read_ranks(words)
        if not rest or rest[0].startswith("-"):
            sys.stderr.write(usage)
            return CONFIGURATION_ERROR
        parsed = parse(rest, ranks.world_size)
    except ConfigError as error:
        return refuse(error.problems)
    if ranks.is_one:
        return _guarded(run, parsed)
    from megatron_rl.cli.launch import launch  # imports torch, which wrong flags need not wait for

    return launch(ranks, entry, rest, ["megatron-rl", command, *words])


def start_rank(words: Sequence[str], parse: Parse[Parsed], run: Callable[[Parsed], int]) -> int:
    """The same on a rank that was launched: its words were found good."""
    _only_warnings()
    return _guarded(run, parse(words, int(os.environ["WORLD_SIZE"])))


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
