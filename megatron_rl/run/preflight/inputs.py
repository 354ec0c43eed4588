"""What a run reads: the tokenizer, the environments with their tasks, and a Hugging Face directory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.environments.config import shown_list
from megatron_rl.environments.loading import Surveyed, survey_list
from megatron_rl.errors import ConfigError, Problem, collecting
from megatron_rl.families import model_directory, read_model, weight_problems
from megatron_rl.run.preflight.chats import chat_format, chat_problems
from megatron_rl.tokenizer import Tokenizer, load_tokenizer


def open_tokenizer(config: RLConfig) -> Tokenizer:
    """Open `--tokenizer-model`, which knows the end tokens that the model's directory names, and the chat flags.

    Raises:
        ConfigError: it cannot be used, or what the directory says of end tokens, or a flag of chats, cannot be read.
    """
    chat = chat_format(config)
    names = [name for name in (config.checkpoint.load_hf, config.model.hf_config) if name is not None]
    tokenizer = load_tokenizer(config.tokenizer.tokenizer_model, [str(model_directory(name)) for name in names])
    return tokenizer.formatting(chat)


def vocabulary(config: RLConfig) -> int:
    """Return `--estimate-vocab-size`, or else the tokenizer's.

    Raises:
        ConfigError: neither is there; names the flag to give.
    """
    if config.training.estimate_vocab_size is not None:
        return config.training.estimate_vocab_size
    advice = "give --estimate-vocab-size N, for example --estimate-vocab-size 151936"
    path = config.tokenizer.tokenizer_model
    if path is None and config.tokenizer.vocab_size is not None:
        return config.tokenizer.vocab_size
    if path is None:
        raise ConfigError([f"without --tokenizer-model the size of the vocabulary is unknown; {advice}"])
    # A name that is in no cache would be looked up on the hub, again and again where there is no network.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        return load_tokenizer(path).vocab_size
    except ConfigError as error:
        raise ConfigError([f"the size of the vocabulary is unknown; {advice} ({error.lines[0]})"]) from error


def tokenizer_problems(config: RLConfig) -> tuple[Tokenizer | None, list[Problem]]:
    """Return the tokenizer for the checks that need it, or None with the reasons."""
    problems: list[Problem] = []
    if config.tokenizer.tokenizer_model is None:
        return None, problems  # already reported as a missing flag
    with collecting(problems):
        return open_tokenizer(config), problems
    return None, problems


def hugging_face_problems(config: RLConfig, tokenizer: Tokenizer | None) -> Iterator[Problem]:
    """Check the headers of the files of `--load-hf`, and whether the tokenizer is the model's."""
    directory, rows = config.checkpoint.load_hf, config.tokenizer.vocab_size
    model, found = None, []
    with contextlib.suppress(ConfigError):  # already reported when the flags were read
        model = None if directory is None else read_model(directory)
    with collecting(found, "--load-hf"):
        if model is not None:
            lines = weight_problems(read_model(directory, weights=True))
            found += [Problem(None, line).under("--load-hf") for line in lines]
    yield from found
    if rows is not None and tokenizer is not None and tokenizer.vocab_size > rows:
        source = directory or config.model.hf_config
        whose = f"--vocab-size {rows}" if source is None else f"the model of {source}, whose vocab_size is {rows}"
        yield Problem(
            "--tokenizer-model",
            f"tokenizer {tokenizer.name!r} has {tokenizer.vocab_size} tokens, which does not fit {whose}; use the "
            "model's own tokenizer",
        )


def environment_problems(config: RLConfig, tokenizer: Tokenizer | None) -> list[Problem]:
    """Find what is wrong with the list, its environments and all of their tasks."""
    problems: list[Problem] = []
    path = config.environment.langrl_env_config
    if path is None:
        return problems  # already reported as a missing flag
    alone = config.training.eval_only
    supervised = not config.training.perform_rl_step and not alone
    with collecting(problems):
        found = survey_list(path, config.environment.rl_environment_load_timeout, demonstrations=supervised)
        lines = _environment_faults(config, shown_list(path), found, supervised)
        problems += [Problem("--langrl-env-config", line) for line in lines]
        if tokenizer is not None and (alone or not all(item.evaluation_only for item in found)):
            problems += dict.fromkeys(chat_problems(config, found, tokenizer))  # several may share a template
    return problems


def _environment_faults(config: RLConfig, path: str, found: Sequence[Surveyed], supervised: bool) -> Iterator[str]:
    trained = [item for item in found if not item.evaluation_only]
    if not trained and not config.training.eval_only:
        yield f"{path}: every environment is evaluation_only, so there is nothing to train on; add one that is not"
        return
    if supervised and not any(item.demonstrates for item in trained):
        names = ", ".join(item.name for item in trained)
        yield (
            f"{path}: no environment gives demonstrations ({names}), which SFT needs; "
            "add --perform-rl-step to train by RL, or an environment that has some"
        )
    if config.training.perform_rl_step:
        yield from _rewards_below(config, trained)
        yield from _unsuited(config, trained)
    # Data that is trained on whole needs no test split where another entry is what models are measured by.
    if config.training.eval_interval is not None and not any(item.test_tasks for item in found):
        names = ", ".join(item.name for item in found)
        yield f"{names}: there are no test tasks, which --eval-interval needs; leave it out, or add a test split"


def _unsuited(config: RLConfig, trained: Sequence[Surveyed]) -> Iterator[str]:
    """Environments that cannot be interrupted, or punish lengths that no answer has."""
    longest = config.rollout.rl_max_new_tokens
    for item in trained:
        copies = config.stages.count > 1 or (config.parallel.expert_model_parallel_size or 1) > 1
        if config.algorithm.rl_partial_rollouts and (item.is_harness or item.max_turns > 1) and copies:
            what = "calls of a harness" if item.is_harness else f"conversations of up to {item.max_turns} turns"
            yield (
                f"{item.name}: its {what} cannot be interrupted by --rl-partial-rollouts over pipeline stages or "
                "expert-parallel ranks, of which none may wait for an environment alone; leave one of them out"
            )
        elif config.algorithm.rl_partial_rollouts and item.is_harness and item.group_seconds is not None:
            yield (
                f"{item.name}: a harness with grade_group cannot be interrupted by --rl-partial-rollouts, because its "
                "samples wait one by one; leave one of them out"
            )
        buffer, max_tokens, free_tokens = item.overlong or (0, 0, 0)
        if longest and longest <= free_tokens:
            yield (
                f"{item.name}: overlong_buffer {buffer} of max_response_tokens {max_tokens} begins "
                f"beyond the {longest} tokens of --rl-max-new-tokens; make max_response_tokens {longest}"
            )


def _rewards_below(config: RLConfig, trained: Sequence[Surveyed]) -> Iterator[str]:
    """Environments that declare rewards which the advantage would refuse in the first step that has one."""
    # imported here: it brings torch, which wrong flags need not wait for
    from megatron_rl.algorithms.extension import advantage_of

    try:
        bound = getattr(advantage_of(config), "lowest_reward", None)
    except ConfigError:  # reported elsewhere
        return
    for item in trained if bound is not None else ():
        if item.reward_range[0] < bound:
            yield (
                f"{item.name}: its rewards begin at {item.reward_range[0]:g}, and --rl-advantage "
                f"{config.algorithm.rl_advantage} takes none below {bound:g}; use --rl-advantage-args "
                f"lowest={item.reward_range[0]:g}"
            )
