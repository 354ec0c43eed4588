"""The environments, their tasks, and whether the tokenizer can render them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.config import RLConfig
from megatron_rl.environments.loading import Surveyed, surveyed
from megatron_rl.errors import ConfigError
from megatron_rl.preflight.chat_template import template_problems
from megatron_rl.tokenizer import Tokenizer


def environment_problems(config: RLConfig, tokenizer: Tokenizer | None) -> list[str]:
    """What is wrong with the list, every environment on it and all of their tasks."""
    path = config.environment.langrl_env_config
    if path is None:
        return []  # already reported as a missing flag
    alone = config.training.eval_only
    supervised = not config.training.perform_rl_step and not alone
    try:
        environments = surveyed(path, config.environment.rl_environment_load_timeout, demonstrations=supervised)
    except ConfigError as error:
        return error.lines
    trained = [item for item in environments if not item.evaluation_only]
    if not trained and not alone:
        return [f"{path}: every environment is evaluation_only, so there is nothing to train on; add one that is not"]
    problems: list[str] = []
    if supervised:
        problems += _demonstrations(path, trained)
    if config.training.perform_rl_step:
        problems += _overlong(config.rollout.rl_max_new_tokens, trained)
    if config.training.eval_interval is not None:
        problems += _held_out(environments)
    if tokenizer is not None:
        problems += _chat_prompts(environments, tokenizer)
    return problems


def _demonstrations(path: str, trained: Sequence[Surveyed]) -> list[str]:
    if any(item.demonstrates for item in trained):
        return []
    names = ", ".join(item.name for item in trained)
    return [
        f"{path}: no environment gives demonstrations ({names}), which supervised training needs; "
        "add --perform-rl-step to train by RL, or an environment that has some"
    ]


def _overlong(longest: int | None, environments: Sequence[Surveyed]) -> list[str]:
    """A length punishment that no answer can reach is a mistake in one of two numbers."""
    problems = []
    for item in environments:
        if item.overlong is None or not longest:
            continue
        buffer, max_tokens, free_tokens = item.overlong
        if longest <= free_tokens:
            problems.append(
                f"{item.name}: overlong_buffer {buffer} of max_response_tokens {max_tokens} begins "
                f"beyond the {longest} tokens of --rl-max-new-tokens; make max_response_tokens {longest}"
            )
    return problems


def _held_out(environments: Sequence[Surveyed]) -> list[str]:
    return [
        f"{item.name}: there are no test tasks, which --eval-interval needs; leave it out, or add a test split"
        for item in environments
        if not item.test_tasks
    ]


def _chat_prompts(environments: Sequence[Surveyed], tokenizer: Tokenizer) -> list[str]:
    """A prompt that is a list of messages needs a chat template to become text, and one that does so."""
    if tokenizer.has_chat_template:
        chats = any(item.first_chat is not None for item in environments)
        return template_problems(tokenizer) if chats else []
    return [
        f"{item.name}: task {item.first_chat!r} is a chat, and tokenizer {tokenizer.name!r} has no chat template; "
        'set "chat_template" in its tokenizer_config.json, or use the tokenizer of a chat model'
        for item in environments
        if item.first_chat is not None
    ]
