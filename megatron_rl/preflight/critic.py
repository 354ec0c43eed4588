"""Whether the model of `--rl-critic-load-hf` can be this policy's critic."""

from __future__ import annotations

from megatron_rl.config import RLConfig
from megatron_rl.errors import Problem, collecting
from megatron_rl.families import Architecture, read_model, weight_problems
from megatron_rl.preflight.teacher import tokenizer_difference
from megatron_rl.tokenizer import Tokenizer

FLAG = "--rl-critic-load-hf"
_FREE = {"vocab_size", "max_position_embeddings", "init_method_std"}
"""Compared below, or nothing that its weights depend on."""


def critic_problems(config: RLConfig, tokenizer: Tokenizer | None) -> list[Problem]:
    """Another architecture, another vocabulary, files that do not hold the model; nothing without the flag."""
    problems: list[Problem] = []
    directory = config.critic.rl_critic_load_hf
    if directory is None or not config.wants_critic or not config.model.is_complete:
        return problems
    with collecting(problems, FLAG):
        model = read_model(directory, weights=True)
        found, lines = model.architecture, weight_problems(model)
        lines += _differences(directory, found, config)
        rows = config.tokenizer.vocab_size or (None if tokenizer is None else tokenizer.vocab_size)
        if rows is not None and found.vocab_size != rows:
            lines.append(
                f"{directory}: it knows {found.vocab_size:,} tokens and the policy {rows:,}; use a model with the "
                "policy's tokenizer"
            )
        elif tokenizer is not None:
            difference = tokenizer_difference(str(model.directory), tokenizer, "the critic's")
            lines += [] if difference is None else [f"{directory}: it {difference}; use a model of the policy's family"]
        problems += [Problem(None, line).under(FLAG) for line in lines]
    return problems


def _differences(directory: str, found: Architecture, config: RLConfig) -> list[str]:
    """The first flag of the shape that differs, and how many more do."""
    own = {name: config.value(name) for name in found.settings() if name not in _FREE}
    differ = [name for name, value in own.items() if getattr(found, name) != value]
    more = f" (and {len(differ) - 1} more settings differ)" if len(differ) > 1 else ""
    return [
        f"{directory}: its {name} is {getattr(found, name)!r}, the policy's {own[name]!r}{more}; a critic has the "
        "policy's architecture: use a model of its family and size"
        for name in differ[:1]
    ]
