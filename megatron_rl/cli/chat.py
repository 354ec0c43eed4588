"""megatron-rl chat MODEL: talk to a model in the terminal.

    MODEL is a Hugging Face directory or name, a run directory, or a checkpoint.
    /exit or Ctrl-D ends the conversation, Ctrl-C stops the answer.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megatron_rl.cli.model import USAGE_OF_FLAGS, ModelCommand, model_config
from megatron_rl.config.rl_config import RLConfig

if TYPE_CHECKING:
    from megatron_rl.generation import Chat, Generator

USAGE = f"usage: megatron-rl chat MODEL [--nproc RANKS] [FLAGS]\n\n{__doc__}\n{USAGE_OF_FLAGS}"
_HALF = "\N{REPLACEMENT CHARACTER}"
"""A character of which not all bytes are drawn yet."""
_OWN = ("--distributed-timeout-minutes", "100000", "--rl-decode-steps-per-sync", "2")
"""The user may think for hours, and an answer is shown as it is drawn."""


def _parse(words: Sequence[str], world_size: int) -> RLConfig:
    return model_config(words[0], [*_OWN, *words[1:]], world_size, at_once=1)


class _Stop:
    """Ctrl-C while an answer is drawn; a rank of several hears it as SIGTERM, see `megatron_rl.cli.launch`."""

    def __init__(self) -> None:
        self.answering = self.asked = False

    def heard(self, number: int, _: object) -> None:
        """Handle the signal."""
        if self.answering:
            self.asked = True
        elif number == signal.SIGTERM:
            raise SystemExit(0)
        else:
            raise KeyboardInterrupt


@contextlib.contextmanager
def _heeding(stop: _Stop) -> Iterator[None]:
    earlier = {number: signal.signal(number, stop.heard) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _talk(config: RLConfig) -> int:
    from megatron_rl.generation import Chat, open_generator
    from megatron_rl.platform.collectives import broadcast_json

    stop = _Stop()
    with open_generator(config) as generator, _heeding(stop):
        chat = Chat(generator)
        while True:
            said = broadcast_json(_line() if generator.groups.is_main else None, source=0)
            if said is None:
                return 0
            if said.strip():
                stop.answering, stop.asked = True, False
                _show(chat, said, stop, generator)
                stop.answering = False


def _line() -> str | None:
    """What the user types; None at the end."""
    while True:
        try:
            sys.stdout.write("> ")
            sys.stdout.flush()
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            sys.stdout.write("\n(/exit or Ctrl-D ends)\n")
            continue
        return None if not line or line.strip() in ("/exit", "/quit") else line.rstrip("\n")


def _show(chat: Chat, said: str, stop: _Stop, generator: Generator) -> None:
    shown = ""
    for text in chat.say(said, lambda: stop.asked):
        ready = text.rstrip(_HALF)
        if generator.groups.is_main and ready.startswith(shown):
            sys.stdout.write(ready[len(shown) :])
            sys.stdout.flush()
            shown = ready
    if generator.groups.is_main:
        sys.stdout.write(" [stopped]\n" if stop.asked else "\n")


COMMAND = ModelCommand("chat", USAGE, _parse, _talk)
main, rank = COMMAND.main, COMMAND.rank
