"""``megatron-rl train --nproc 8 FLAGS``, and the commands that are the same with a flag more."""

from __future__ import annotations

import functools
import os
import shlex
import sys
from collections.abc import Sequence

from megatron_rl.cli import COMMANDS, propose
from megatron_rl.cli.first_run import HEADING, FirstRun, full_flags, is_first_run, show
from megatron_rl.cli.options import Ranks, described, read_ranks
from megatron_rl.config.arguments import read_config
from megatron_rl.config.reference import help_text
from megatron_rl.errors import ConfigError, Problem
from megatron_rl.main import every_problem, refuse
from megatron_rl.main import main as run_here
from megatron_rl.metrics.logging import configure_logging
from megatron_rl.run.preflight.starts import resumes
from megatron_rl.signals import TYPED_COMMAND, by_torchrun

_OWN_FLAGS = {
    "eval": (
        "load", "rl_prompts_per_eval", "rl_samples_per_eval_prompt", "rl_eval_temperature", "rl_eval_top_p",
        "rl_eval_top_k", "rl_eval_max_new_tokens",
    ),
    "check": ("check_world_size",),
    "estimate": ("check_world_size", "estimate_vocab_size"),
}  # fmt: skip
"""What the help of a command shows beside the common flags."""


def _run(name: str, words: Sequence[str], more: Sequence[str] = ()) -> int:
    """The exit code of `megatron_rl.main.main`, of whichever rank ended first where one failed."""
    if {"-h", "--help", "--help-all"} & set(words):
        usage = f"megatron-rl {name} [--nproc RANKS] [--nnodes N --node-rank R --master-addr HOST]"
        told = {"starts": (usage,), "about": COMMANDS[name][1], "own": _OWN_FLAGS.get(name, ())}
        usage, rest = help_text(common_only="--help-all" not in words, **told).split("\n\n", 1)
        first = f"{HEADING}\n{described(FirstRun)}\n" if name == "train" else ""
        sys.stdout.write(f"{usage}\n\n{first}{rest}")
        return 0
    command = ["megatron-rl", name, *words]
    try:
        if is_first_run(words):
            ranks, flags = full_flags(words)
            command = ["megatron-rl", name, "--nproc", str(ranks.nproc), *flags]
            show(["megatron-rl", "eval" if name == "eval" else "train", *command[2:]], ranks)
        else:
            ranks, flags = read_ranks(words)
    except ConfigError as error:
        return refuse(error.problems)
    argv = [*flags, *more]
    asks = bool({"--check", "--estimate"} & set(argv))
    if ranks.is_one or asks:
        typed = None if by_torchrun() else command
        return run_here(["megatron-rl", *argv], typed, ranks.world_size if ranks.world_size > 1 else None)
    return _launch(ranks, argv, command)


train = functools.partial(_run, "train")
evaluate = functools.partial(_run, "eval", more=("--eval-only",))
check = functools.partial(_run, "check", more=("--check",))  # for as many ranks as a launch of these words would start


def estimate(words: Sequence[str]) -> int:
    """Print the bytes of the run that ``words`` mean; with --gpus the layouts that fit."""
    return propose.main(words) if propose.proposes(words) else _run("estimate", words, more=("--estimate",))


def _launch(ranks: Ranks, argv: Sequence[str], command: Sequence[str]) -> int:
    """What can be found wrong is found here, before there are ranks, and by one machine."""
    configure_logging(rank=0)
    config, problems = read_config(argv, ranks.world_size)
    found = [*problems] if ranks.node_rank else every_problem(config, problems, ranks.world_size)
    if ranks.max_restarts and not (resumes(config) or config.training.eval_only):
        given = f"--max-restarts {ranks.max_restarts}"
        why = "what is started again would find its own run directory taken; add --resume"
        found.append(Problem("--max-restarts", f"{given} without --resume: {why}"))
    if found:
        return refuse(found)
    from megatron_rl.cli.launch import launch  # imports torch, which wrong flags need not wait for

    return launch(ranks, "megatron_rl.cli.train:rank", argv, command)


def rank(words: Sequence[str]) -> int:
    """Do what each launched rank does. `_launch` has checked it; much may have changed when one is restarted."""
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    return run_here(["megatron-rl", *words], shlex.split(os.environ[TYPED_COMMAND]), is_checked=is_first)
