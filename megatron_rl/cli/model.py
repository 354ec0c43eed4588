"""What `chat`, `generate` and `serve` share: a MODEL, which is one word, and how they begin.

MODEL is a Hugging Face directory or name, or a run of ours.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from megatron_rl.cli.options import read_ranks
from megatron_rl.config.arguments import read_config
from megatron_rl.config.model_directory import saved_model
from megatron_rl.config.rl_config import RLConfig, all_flags
from megatron_rl.environments.checks import Chats, note_chat
from megatron_rl.errors import ConfigError, MegatronRLError, Problem
from megatron_rl.families import read_model
from megatron_rl.main import CONFIGURATION_ERROR, RUN_ERROR, refuse
from megatron_rl.metrics.logging import configure_logging
from megatron_rl.metrics.rundir import RunDirectory
from megatron_rl.run.preflight import preflight
from megatron_rl.run.preflight.chats import template_problems
from megatron_rl.run.preflight.inputs import open_tokenizer
from megatron_rl.types import Prompt
from megatron_rl.user_files import path_refusal

Parsed = TypeVar("Parsed")

LONGEST_BY_DEFAULT = 4096
ANSWER_BY_DEFAULT = 1024
SHORT = {
    "--temperature": "--rl-eval-temperature",
    "--top-p": "--rl-eval-top-p",
    "--top-k": "--rl-eval-top-k",
    "--max-new-tokens": "--rl-max-new-tokens",
}
"""Flags that have a longer name in a run."""
USAGE_OF_FLAGS = """  --temperature N, --top-p N, --top-k N, --max-new-tokens N, --seed N
  and the flags of a run, such as --bf16, --seq-length and --tensor-model-parallel-size (megatron-rl train --help-all)
"""
_TAKEN_FROM_A_RUN = (
    "bf16", "max_position_embeddings", "make_vocab_size_divisible_by", "chat_template", "chat_template_kwargs",
    "system_prompt", "rl_tool_call_parser", "rl_reasoning_parser",
)  # fmt: skip
"""What a run's config.yaml says and its checkpoints, which bring shape and tokenizer, do not."""


@dataclass(frozen=True)
class ModelCommand(Generic[Parsed]):
    """A command that takes a MODEL. It runs in this process, or on the ranks that it launches."""

    name: str
    """That of its module, too."""
    usage: str
    parse: Callable[[Sequence[str], int], Parsed]
    """(words, world size) -> what it needs; raises ConfigError."""
    run: Callable[[Parsed], int]

    def main(self, words: Sequence[str]) -> int:
        """Return the exit code: 0 done, or ended by the user; 1 failed; 2 wrong flags, prompts or files."""
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
        from megatron_rl.cli.launch import launch

        return launch(ranks, f"megatron_rl.cli.{self.name}:rank", rest, ["megatron-rl", self.name, *words])

    def rank(self, words: Sequence[str]) -> int:
        """Do the same on a rank that was launched: its words were found good."""
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


def model_config(
    name: str, words: Sequence[str], world_size: int, at_once: int, prompts: Sequence[Prompt] = ("",)
) -> RLConfig:
    """Return the configuration of an evaluation of the model, without environments; ``words`` are further flags.

    Args:
        at_once: answers decoded at the same time, unless ``words`` say so.
        prompts: chats that the model will be asked, or what a user says in one.

    Raises:
        ConfigError: every problem of the flags, of the model's files and of this machine.
    """
    if os.path.isdir(name) and not os.path.isfile(f"{name}/config.json"):
        flags, positions = _of_run(Path(name))
    else:
        flags, positions = ["--load-hf", name], read_model(name).architecture.max_position_embeddings
    longest = min(positions or LONGEST_BY_DEFAULT, LONGEST_BY_DEFAULT)
    defaults = ["--seq-length", longest, "--rl-max-new-tokens", max(1, min(ANSWER_BY_DEFAULT, longest // 2))]
    defaults += ["--inference-max-batch-size", at_once, "--langrl-env-config", "none", "--run-dir", "none"]
    defaults += ["--seed", RLConfig().training.seed]  # not that of the model's run, as an evaluation has it
    argv = ["--eval-only", *map(str, defaults), *flags, *_in_long(words)]
    config, problems = read_config(argv, world_size)
    if problems := problems or preflight(config, is_run=False) or _of_template(config, prompts):
        raise ConfigError(problems)
    return config


def _of_template(config: RLConfig, prompts: Sequence[Prompt]) -> list[Problem]:
    tokenizer, chats = open_tokenizer(config), Chats()
    for number, prompt in enumerate(prompts, start=1):
        note_chat(chats, "prompt", number, prompt)
    is_used = prompts and (tokenizer.has_chat_template() or any(messages for _, messages in chats.values()))
    return list(template_problems(tokenizer, "", dict(chats.values()))) if is_used else []


def _in_long(words: Sequence[str]) -> list[str]:
    """Temperature 0 is what others call greedy."""
    found: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        found += [SHORT.get(name, name), *([value] if equals else [])]
    for index, word in enumerate(found[:-1]):
        if word == SHORT["--temperature"] and found[index + 1] in ("0", "0.0"):
            found[index : index + 2] = [SHORT["--top-k"], "1"]
    return found


def _of_run(path: Path) -> tuple[list[str], int | None]:
    """Flags for a checkpoint, the checkpoints of a run, or the run: where it is, and what its run was told besides."""
    flags = ["--load", str(path)]
    folders = (path, *Path(os.path.realpath(path)).parents[:2])
    run = next((found for found in map(RunDirectory, folders) if found.config.is_file()), None)
    saved = saved_model(str(path))
    if run is None and saved is None:
        raise ConfigError([
            f"{path} has no config.json of Hugging Face and no checkpoint of ours and, there or above, no config.yaml "
            "of a run of ours; give a model, a run directory or a checkpoint in it"
        ])
    if run is None:
        return flags, saved.flags.get("max_position_embeddings")
    settings = run.read_settings()
    for flag in all_flags():
        if flag.name in _TAKEN_FROM_A_RUN and settings.get(flag.name) not in (None, flag.default):
            flags += shlex.split(flag.typed(settings[flag.name]))
    return flags, settings.get("max_position_embeddings")
