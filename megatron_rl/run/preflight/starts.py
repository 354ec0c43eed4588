"""What is loaded at the start: which run goes on, which weights a run begins with, and whether they are there."""

from __future__ import annotations

import os
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.config.lora import lora_of
from megatron_rl.config.records import names_several
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import CheckpointError, ConfigError, Problem, collecting
from megatron_rl.families import ModelLayout, WeightMap, model_directory, read_model, weight_problems
from megatron_rl.families.peft import file_problems, lora_at
from megatron_rl.families.weights import decoder_weights
from megatron_rl.tokenizer import Tokenizer

if TYPE_CHECKING:  # megatron-core takes seconds, which --help and wrong flags need not wait for
    from megatron_rl.checkpoint.run_state import RunState, StartingWeights


def resumes(config: RLConfig) -> bool:
    """Return whether the run continues what its own directory holds, if it holds something.

    Either that was asked for, or `--load` names `--save`, with `--finetune` too: that is for the first start.
    """
    return config.checkpoint.resume or (config.loads_what_it_saves and not config.training.eval_only)


def run_to_continue(config: RLConfig) -> tuple[str, str] | None:
    """Return flag and directory of the run to continue; None if one begins. Its own checkpoints precede `--load`."""
    from megatron_rl.checkpoint.layout import holds_checkpoint, step_entries

    checkpoint = config.checkpoint
    if resumes(config) and checkpoint.save is not None and step_entries(Path(checkpoint.save)):
        return "--resume", checkpoint.save
    if checkpoint.load is not None and not checkpoint.finetune and holds_checkpoint(checkpoint.load):
        return "--load", checkpoint.load
    return None


def first_weights(config: RLConfig) -> tuple[str, StartingWeights]:
    """Return flag and place of what a run begins with, not yet read. It means the same at every start of the run."""
    from megatron_rl.checkpoint.layout import holds_checkpoint
    from megatron_rl.checkpoint.run_state import StartingWeights

    checkpoint = config.checkpoint
    load = checkpoint.load
    if checkpoint.finetune and load is not None and not config.loads_what_it_saves and holds_checkpoint(load):
        return "--load", StartingWeights.at("checkpoint", load)
    if checkpoint.pretrained_checkpoint is not None:
        return "--pretrained-checkpoint", StartingWeights.at("checkpoint", checkpoint.pretrained_checkpoint)
    if checkpoint.load_hf is not None:
        return "--load-hf", StartingWeights.at("hugging_face", str(model_directory(checkpoint.load_hf)))
    return "", StartingWeights("drawn")


def reads_every_weight(config: RLConfig) -> bool:
    """Return whether the run's first weights are files of `--load-hf`, so that none need be drawn at random."""
    return first_weights(config)[1].kind == "hugging_face"


def family_weights(config: RLConfig) -> WeightMap:
    """Return how Hugging Face calls the model's tensors; Llama's names where no directory says which family it is."""
    named = config.checkpoint.load_hf or config.model.hf_config
    return decoder_weights(config.architecture()) if named is None else read_model(named).weights


def adapter_problems(config: RLConfig) -> list[Problem]:
    """Report tensors of `--load-lora` and `--rl-teacher-lora` that are not those of adapters of this model."""
    problems: list[Problem] = []
    if lora_of(config) is None or not config.has_shape:
        return problems
    whole = ModelLayout.of(config.architecture())  # of all stages and experts: the files are of no rank
    named = {"--load-lora": config.lora.load_lora, "--rl-teacher-lora": config.teacher.rl_teacher_lora}
    for name, directory in named.items():
        with collecting(problems, name):
            if directory is not None:
                found = file_problems(Path(directory), whole, lora_at(directory), family_weights(config))
                problems += [Problem(None, line).under(name) for line in found]
    return problems


def reference_weights(config: RLConfig, directory: Path, state: RunState) -> StartingWeights:
    """Return the weights that the run saved in ``directory`` started from, and where this start is to read them.

    Where the flags name another place than the run was started with, the weights lie there now.

    Raises:
        CheckpointError: neither the checkpoint nor a flag says where.
    """
    recorded, (_, named) = state.origin, first_weights(config)
    if recorded is None:
        if named.kind == "drawn":
            raise CheckpointError(
                f"checkpoint {str(directory)!r} of an earlier version does not say what its run started from, which is "
                "the reference of --grpo-kl-beta; name it with --pretrained-checkpoint or --load-hf, or "
                "leave the flag out"
            )
        return named
    if named.kind == "drawn" or named.given == recorded.given:
        return recorded
    return replace(named, weights=recorded.weights)


def evaluated(config: RLConfig) -> list[RLConfig]:
    """Return one configuration for each checkpoint of an evaluation with ``--load 'runs/mine/checkpoints/*'``.

    Oldest first; what is no checkpoint is passed over. Of any other run the configuration itself.
    """
    from megatron_rl.checkpoint.layout import is_step, step_of

    pattern = config.checkpoint.load
    if not (config.training.eval_only and names_several(pattern)):
        return [config]
    found = sorted((path for path in map(Path, glob(pattern)) if is_step(path)), key=lambda path: (step_of(path), path))
    return [replace(config, checkpoint=replace(config.checkpoint, load=str(path))) for path in found]


def checkpoint_problems(config: RLConfig, tokenizer: Tokenizer | None) -> list[Problem]:
    """Report checkpoints that are absent, of another model, or of a run this one cannot continue.

    Checksums are compared when a checkpoint is loaded: at the size of a large model they take minutes.
    """
    named = config.checkpoint
    if named.load is None and named.pretrained_checkpoint is None and not os.path.isdir(named.save or ""):
        return []  # without seconds of importing megatron-core
    from megatron_rl.checkpoint.layout import find_checkpoint
    from megatron_rl.checkpoint.run_state import architecture_problems, continuation_problems

    vocab_size = None if tokenizer is None else tokenizer.vocab_size
    if names_several(config.checkpoint.load):
        several: list[Problem] = []
        with collecting(several, "--load"):
            several += [problem for one in _each(config) for problem in checkpoint_problems(one, tokenizer)]
        return several
    continued, problems = run_to_continue(config), []
    for flag, path in [continued] if continued is not None else _weights_alone(config):
        with collecting(problems, flag):
            directory = find_checkpoint(path, contents=False)
            found = architecture_problems(config, directory, vocab_size)
            if continued is not None:
                found += continuation_problems(config, directory) + _critic_problems(config, directory)
                found = found or _reference_problems(config, directory, vocab_size)
            problems += [Problem(None, line).under(flag) for line in found]
    return problems


def _each(config: RLConfig) -> list[RLConfig]:
    """See `evaluated`; empty of any other program, which takes no pattern.

    Raises:
        CheckpointError: there is nothing to evaluate, or results of two could not be told apart.
    """
    if not config.training.eval_only:
        return []
    from megatron_rl.checkpoint.layout import step_of

    each = evaluated(config)
    paths = [Path(one.checkpoint.load) for one in each]
    if not paths:
        raise CheckpointError(
            f"{config.checkpoint.load!r} matches no checkpoint; they are called step_... or iter_..., as in "
            "'runs/mine/checkpoints/*'"
        )
    for one, other in zip(paths, paths[1:], strict=False):
        if step_of(one) == step_of(other):
            raise CheckpointError(f"{str(one)!r} and {str(other)!r} are of the same step; evaluate one run at a time")
    return each


def _weights_alone(config: RLConfig) -> list[tuple[str, str]]:
    """Flag and directory of the checkpoints a new run starts from; also of an empty `--load`, unless it may be."""
    try:
        flag, origin = first_weights(config)
    except ConfigError:  # of a --load-hf that cannot be had; reported when the flags were read
        return []
    load = config.checkpoint.load
    # Megatron's habit: the first start of a run names an empty --load, and where else to start from.
    if load is not None and origin.kind == "drawn" and not config.loads_what_it_saves:
        return [("--load", load)]
    return [(flag, origin.given)] if origin.kind == "checkpoint" else []


def _critic_problems(config: RLConfig, directory: Path) -> list[str]:
    """A whole critic and one on the policy's base, or two ranks of adapters, have no tensors in common."""
    from megatron_rl.checkpoint.run_state import read_run_state

    state = read_run_state(directory)
    ranks = state.components.get("settings", {}).get("rl_critic_lora_rank"), config.critic.rl_critic_lora_rank
    if not config.wants_critic or state.critic_has_optimizer is None or ranks[0] == ranks[1]:
        return []
    saved, own = ("that is a whole model" if rank is None else f"of --rl-critic-lora-rank {rank}" for rank in ranks)
    return [
        f"checkpoint {str(directory)!r} has a critic {saved}, this run has one {own}; use the same, or start a new run "
        "from its weights with --pretrained-checkpoint"
    ]


def _reference_problems(config: RLConfig, directory: Path, vocab_size: int | None) -> list[str]:
    from megatron_rl.checkpoint.layout import find_checkpoint
    from megatron_rl.checkpoint.run_state import architecture_problems, read_run_state

    if not (config.wants_reference or config.lora.lora_rank):
        return []
    origin = reference_weights(config, directory, read_run_state(directory))
    problems: list[Problem] = []
    found: list[str] = []
    with collecting(problems):
        if origin.kind == "checkpoint":
            found = architecture_problems(config, find_checkpoint(origin.path, contents=False), vocab_size)
        elif origin.kind == "hugging_face":
            found = weight_problems(read_model(origin.path))
    what, or_else = "the reference of --grpo-kl-beta", ", or leave the flag out"
    if config.lora.lora_rank:
        what, or_else = "the base of the adapters", ""
    return [
        f"{what} is what the run started from: {line}; if it lies elsewhere now, name that place with "
        f"--pretrained-checkpoint or --load-hf{or_else}"
        for line in (*found, *problems)
    ]
