"""The `megatron-rl` command: one file a sub-command, imported when it is asked for."""

from __future__ import annotations

import difflib
import importlib
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import megatron_rl
from megatron_rl.errors import shorten
from megatron_rl.main import CONFIGURATION_ERROR
from megatron_rl.signals import with_streams

COMMANDS = {
    "train": ("megatron_rl.cli.train:train", "train, on as many ranks as --nproc says"),
    "eval": ("megatron_rl.cli.train:evaluate", "evaluate weights on held-out tasks: train --eval-only"),
    "check": ("megatron_rl.cli.train:check", "look for everything wrong with the flags of train, and stop"),
    "estimate": ("megatron_rl.cli.train:estimate", "print the bytes that a run takes on each rank, by phase"),
    "chat": ("megatron_rl.cli.chat:main", "talk to a checkpoint or a Hugging Face model"),
    "generate": ("megatron_rl.cli.generate:main", "answer the prompts of a file"),
    "serve": ("megatron_rl.cli.serve:main", "answer OpenAI's clients: chat and completions over HTTP"),
    "import": ("megatron_rl.cli.import_gguf:main", "write the model of a GGUF file as a Hugging Face directory"),
    "export": ("megatron_rl.cli.export:main", "write a checkpoint as a Hugging Face directory"),
    "report": ("megatron_rl.metrics.report:main", "write a run's report.html anew"),
    "compare": ("megatron_rl.metrics.compare:main", "what runs were told differently, and what came of it"),
    "convert": ("megatron_rl.cli.convert:main", "write a configuration of another trainer (TRL, verl, ...) as ours"),
    "replay": ("megatron_rl.cli.replay:main", "recompute a sample of a step: log-probs, advantage, gradient"),
    "doctor": ("megatron_rl.cli.doctor:main", "say whether this machine can run it, and how to mend what cannot"),
    "completion": ("megatron_rl.cli.completion:main", "write a script for tab completion in bash or zsh"),
    "test": ("megatron_rl.environments.__main__:test", "test an environment before training on it"),
    "new": ("megatron_rl.environments.__main__:new", "write an environment to start from, with its test"),
}
"""Sub-command -> what runs it, given the words behind it, and its line in the help."""


@with_streams
def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of the sub-command, see ``megatron_rl.main.main``; 2 if there is none."""
    command, *words = [*(sys.argv[1:] if argv is None else argv)] or [""]
    if command in ("-h", "--help"):
        sys.stdout.write(_usage())
        return 0
    if command == "--version":
        sys.stdout.write(f"megatron-rl {megatron_rl.__version__}\n")
        return 0
    if command not in COMMANDS:
        near = difflib.get_close_matches(command[:40], COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "these are the commands:"
        sys.stderr.write(f"unknown command {shorten(command)}; {hint}\n\n" if command else "")
        sys.stderr.write(_usage())
        return CONFIGURATION_ERROR
    module, function = COMMANDS[command][0].split(":")
    return getattr(importlib.import_module(module), function)(words)


def entry() -> NoReturn:
    """Run the process of a command, which ends with its exit code.

    Once the command has ended, a Ctrl-C is too late: while Python clears up, it would end the process by a signal.
    """
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join([
        "usage: megatron-rl COMMAND ...", "", *lines, "",
        "megatron-rl COMMAND --help says more; megatron-rl --version prints the version.", "",
    ])  # fmt: skip
