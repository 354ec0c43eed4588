"""Whether the models beside the policy fit it: the teacher's and the critic's files, layout, shape and tokens."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.config.rules import teacher_layout_problems
from megatron_rl.errors import Problem, collecting
from megatron_rl.families import Architecture, read_model, weight_problems
from megatron_rl.tokenizer import Tokenizer, load_tokenizer

_TEACHER, _CRITIC = "--rl-teacher-load-hf", "--rl-critic-load-hf"
_FILES_OF_A_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "vocab.json")
_FREE = {"vocab_size", "max_position_embeddings", "init_method_std"}
"""Compared by itself, or nothing that a critic's weights depend on."""


def teacher_problems(config: RLConfig, tokenizer: Tokenizer | None) -> list[Problem]:
    """Report everything that is wrong with the teacher; nothing without one."""
    problems: list[Problem] = []
    directory = config.teacher.rl_teacher_load_hf
    if directory is None:
        return problems  # adapters on the policy's base: `starts.adapter_problems`
    with collecting(problems, _TEACHER):
        model = read_model(directory, weights=True)
        problems += [Problem(None, line).under(_TEACHER) for line in weight_problems(model)]
        if config.has_shape:  # else the policy has no layout to compare with
            problems += teacher_layout_problems(config)
        if tokenizer is None:
            return problems
        # It scores the ids of the policy's tokens: they must be its own.
        rows, name = model.architecture.vocab_size, f"{_TEACHER} {model.directory}"
        if rows < tokenizer.vocab_size:
            text = (
                f"{name}: the teacher knows {rows:,} tokens, and tokenizer {tokenizer.name!r} has "
                f"{tokenizer.vocab_size:,}; use a teacher with the policy's vocabulary"
            )
            problems.append(Problem(_TEACHER, text))
        elif difference := _tokenizer_difference(model.directory, tokenizer):
            problems.append(Problem(_TEACHER, f"{name} {difference}; use a teacher of the policy's family"))
    return problems


def _tokenizer_difference(directory: Path, tokenizer: Tokenizer) -> str | None:
    """How the tokenizer of a model's directory differs, in words; None where it has none, or the same tokens."""
    if not any((directory / name).is_file() for name in _FILES_OF_A_TOKENIZER):
        return None
    difference = tokenizer.difference(load_tokenizer(str(directory)))
    return None if difference is None else f"has another tokenizer than {tokenizer.name!r}: {difference}"


def critic_problems(config: RLConfig, tokenizer: Tokenizer | None) -> list[Problem]:
    """Report another architecture, another vocabulary, files that do not hold the model; nothing without the flag."""
    problems: list[Problem] = []
    directory = config.critic.rl_critic_load_hf
    if directory is None or not config.wants_critic or not config.has_shape:
        return problems
    with collecting(problems, _CRITIC):
        model = read_model(directory, weights=True)
        found, lines = model.architecture, weight_problems(model)
        lines += [f"{directory}: {line}" for line in _differences(found, config)]
        rows = config.tokenizer.vocab_size or (None if tokenizer is None else tokenizer.vocab_size)
        if rows is not None and found.vocab_size != rows:
            lines.append(
                f"{directory}: it knows {found.vocab_size:,} tokens and the policy {rows:,}; use a model with the "
                "policy's tokenizer"
            )
        elif tokenizer is not None and (difference := _tokenizer_difference(model.directory, tokenizer)):
            lines.append(f"{directory}: it {difference}; use a model of the policy's family")
        problems += [Problem(None, line).under(_CRITIC) for line in lines]
    return problems


def _differences(found: Architecture, config: RLConfig) -> list[str]:
    """The first flag of the shape that differs, and how many more do."""
    own = {name: config.value(name) for name in found.settings() if name not in _FREE}
    differ = [name for name, value in own.items() if getattr(found, name) != value]
    more = f" (and {len(differ) - 1} more settings differ)" if len(differ) > 1 else ""
    return [
        f"its {name} is {getattr(found, name)!r}, the policy's {own[name]!r}{more}; a critic has the policy's "
        "architecture: use a model of its family and size"
        for name in differ[:1]
    ]
