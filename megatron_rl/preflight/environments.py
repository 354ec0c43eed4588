"""The environments, their tasks, and whether the tokenizer can render them."""

from __future__ import annotations

from megatron_rl.config import RLConfig
from megatron_rl.environments.base import Environment
from megatron_rl.environments.config import set_up_environments
from megatron_rl.environments.data import DatasetEnvironment
from megatron_rl.errors import ConfigError
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Split


def environment_problems(config: RLConfig, tokenizer: Tokenizer | None) -> list[str]:
    """What is wrong with the list, every environment on it and all of their tasks."""
    path = config.environment.langrl_env_config
    if path is None:
        return []  # already reported as a missing flag
    try:
        environments = set_up_environments(path)
    except ConfigError as error:
        return list(error.problems)
    trained = {name: item for name, item in environments.items() if not item.evaluation_only}
    alone = config.training.eval_only
    if not trained and not alone:
        return [f"{path}: every environment is evaluation_only, so there is nothing to train on; add one that is not"]
    problems: list[str] = []
    if not config.training.perform_rl_step and not alone:
        problems += _demonstrations(path, trained)
    if config.training.perform_rl_step:
        problems += _overlong(config.rollout.rl_max_new_tokens, trained)
    if config.training.eval_interval is not None:
        problems += _held_out(environments)
    if tokenizer is not None and not tokenizer.has_chat_template:
        problems += _chat_prompts(environments, tokenizer)
    return problems


def _demonstrations(path: str, trained: dict[str, Environment]) -> list[str]:
    for name, environment in trained.items():
        try:
            if any(True for _ in environment.demonstrations("train")):
                return []
        except Exception as error:  # noqa: BLE001 - an author's code may raise anything
            return [f"{name}: demonstrations raises {type(error).__name__}: {error}"]
    return [
        f"{path}: no environment gives demonstrations ({', '.join(trained)}), which supervised training needs; "
        "add --perform-rl-step to train by RL, or an environment that has some"
    ]


def _overlong(longest: int | None, environments: dict[str, Environment]) -> list[str]:
    """A length punishment that no answer can reach is a mistake in one of two numbers."""
    return [
        f"{name}: overlong_buffer {item.overlong.buffer} of max_response_tokens {item.overlong.max_tokens} begins "
        f"beyond the {longest} tokens of --rl-max-new-tokens; make max_response_tokens {longest}"
        for name, item in environments.items()
        if isinstance(item, DatasetEnvironment) and longest and longest <= item.overlong.free_tokens
    ]


def _held_out(environments: dict[str, Environment]) -> list[str]:
    return [
        f"{name}: there are no test tasks, which --eval-interval needs; leave it out, or add a test split"
        for name, environment in environments.items()
        if not any(True for _ in environment.tasks("test"))
    ]


def _chat_prompts(environments: dict[str, Environment], tokenizer: Tokenizer) -> list[str]:
    """A prompt that is a list of messages needs a chat template to become text."""
    problems = []
    for name, environment in environments.items():
        splits: tuple[Split, ...] = ("test",) if environment.evaluation_only else ("train", "test")
        tasks = (task for split in splits for task in environment.tasks(split))
        chat = next((task for task in tasks if not isinstance(task.prompt, str)), None)
        if chat is not None:
            problems.append(
                f"{name}: task {chat.id!r} is a chat, and tokenizer {tokenizer.name!r} has no chat template; "
                'set "chat_template" in its tokenizer_config.json, or use the tokenizer of a chat model'
            )
    return problems
