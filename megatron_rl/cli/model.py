"""The model that `chat` and `generate` are given as one word: a Hugging Face directory or name, or a run of ours."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config import RLConfig, read_config
from megatron_rl.config.flags import flags_of
from megatron_rl.config.rl_config import section_classes
from megatron_rl.errors import ConfigError, Problem
from megatron_rl.families import read_model

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
_DESCRIBES = ("model", "tokenizer")
_ELSEWHERE = ("hf_config",)
"""May be gone since; the shape that it gave is there."""


def model_config(name: str, words: Sequence[str], world_size: int, at_once: int) -> RLConfig:
    """The configuration of an evaluation of the model, without environments; ``words`` are further flags.

    Args:
        at_once: answers decoded at the same time, unless ``words`` say so.

    Raises:
        ConfigError: every problem of the flags, of the model's files and of this machine.
    """
    flags, positions = _of_run(Path(name)) if _is_ours(Path(name)) else _of_hugging_face(name)
    longest = min(positions or LONGEST_BY_DEFAULT, LONGEST_BY_DEFAULT)
    defaults = ["--seq-length", longest, "--rl-max-new-tokens", max(1, min(ANSWER_BY_DEFAULT, longest // 2))]
    defaults += ["--inference-max-batch-size", at_once, "--langrl-env-config", "none", "--run-dir", "none"]
    argv = ["--eval-only", *map(str, defaults), *flags, *_in_long(words)]
    config, problems = read_config(argv, world_size)
    if problems := problems or _other_problems(config):
        raise ConfigError(problems)
    return config


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


def _other_problems(config: RLConfig) -> list[Problem]:
    from megatron_rl.preflight import inputs, machine, starts

    tokenizer, problems = inputs.tokenizer_problems(config)
    return [
        *problems,
        *starts.checkpoint_problems(config, tokenizer),
        *inputs.hugging_face_problems(config, tokenizer),
        *machine.quantization_problems(config),
        *machine.attention_problems(config),
        *machine.backend_problems(config),
    ]


def _of_hugging_face(name: str) -> tuple[list[str], int | None]:
    return ["--load-hf", name], read_model(name).architecture.max_position_embeddings


def _is_ours(path: Path) -> bool:
    return path.is_dir() and not (path / "config.json").is_file()


def _of_run(path: Path) -> tuple[list[str], int | None]:
    """Flags of a checkpoint, of the checkpoints of a run, or of the run, as its config.yaml has them."""
    places = [folder / "config.yaml" for folder in (path, *path.resolve().parents[:2])]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise ConfigError([
            f"{path} has no config.json of Hugging Face and, there or above, no config.yaml of a run of ours; give a "
            "model, a run directory or a checkpoint in it"
        ])
    settings: dict[str, dict[str, Any]] = yaml.safe_load(found.read_text(encoding="utf-8"))
    flags = ["--load", str(path / "checkpoints" if (path / "checkpoints").is_dir() else path)]
    flags += ["--bf16"] if settings["precision"]["bf16"] else []
    for section in _DESCRIBES:
        for flag in flags_of(section_classes()[section]):
            value = settings[section].get(flag.name)
            unset = False if flag.default is None and flag.kind is bool else None
            if value not in (unset, None, flag.default) and flag.name not in _ELSEWHERE:
                flags += shlex.split(flag.typed(value))
    return flags, settings["model"]["max_position_embeddings"]
