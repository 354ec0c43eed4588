"""What a run starts or goes on from, and what its reference policy is.

    begins       weights that a flag names, or random ones ─► reference ─► critic ─► optimizers
    goes on      the weights the run began with ─► reference ─► critic ─► optimizers ─► its checkpoint into all
                 (only if there is a reference)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_rl.checkpoint.adapters import is_adapted
from megatron_rl.checkpoint.hf.load import load_hf
from megatron_rl.checkpoint.hf.peft import load_peft
from megatron_rl.checkpoint.manager import CheckpointManager
from megatron_rl.checkpoint.run_state import RunState, StartingWeights, has_adapters, read_run_state
from megatron_rl.checkpoint.tensors import fingerprints
from megatron_rl.config.lora import critic_lora_of, lora_of
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.config.training import critic_config
from megatron_rl.errors import CheckpointError
from megatron_rl.families import read_model
from megatron_rl.models.gpt import PolicyModel, build_model
from megatron_rl.models.lora import adapt
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.quantization.rollout import RolloutQuantization
from megatron_rl.run.preflight.starts import family_weights, first_weights, reference_weights, resumes, run_to_continue
from megatron_rl.trainer.optimizer import Optimization
from megatron_rl.trainer.policy import BasePolicy, ReferencePolicy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """The model is filled; what is made of it."""

    optimization: Optimization
    reference: ReferencePolicy | BasePolicy | None
    """None where nothing asks it."""
    saved: RunState | None
    """None where the run begins."""
    origin: StartingWeights | None
    """What the run began with, be it at an earlier start; None of a run that an earlier version began."""
    end_token_ids: Sequence[int]
    """What ended an answer in the run that the weights come from."""
    critic: Optimization | None
    """The critic with its optimizer; None without one."""


def start_weights(
    config: RLConfig, policy: PolicyModel, checkpoints: CheckpointManager, groups: ParallelGroups,
    copies: RolloutQuantization | None = None,
) -> Start:  # fmt: skip
    """Fill the model as `run_to_continue` and `first_weights` say; collective.

    What a run that goes on began with is read again and compared where it is the reference, or the base of adapters.

    Raises:
        CheckpointError: something is damaged or of another model, or the reference is not what the run began with.
    """
    directory, lora = _to_continue(config, checkpoints), lora_of(config)
    if directory is None:
        origin = read_first_weights(config, policy, checkpoints, groups)
    elif config.wants_reference or lora is not None:
        origin = _read_again(config, directory, policy, checkpoints, groups)
    else:
        origin = read_run_state(directory).origin
    if directory is not None and lora is not None:
        adapt(policy, config, lora, groups)
    kind = ReferencePolicy if lora is None else BasePolicy
    reference = kind(policy, copies) if config.wants_reference else None
    critic = first_critic(config, policy, groups) if config.wants_critic else None
    optimization = Optimization(policy, config, copies)
    if directory is None:
        return Start(optimization, reference, None, origin, end_tokens_of(origin), critic)
    with_optimizer = not config.checkpoint.no_load_optim
    saved = checkpoints.resume(directory, policy, optimization, with_optimizer, critic)
    return Start(optimization, reference, saved, origin, saved.model.end_token_ids, critic)


def first_critic(config: RLConfig, policy: PolicyModel, groups: ParallelGroups) -> Optimization:
    """Build the critic as a run begins with it: the trunk of `--rl-critic-load-hf`, else the policy's as it is now.

    With `--rl-critic-lora-rank` it has no weights of its own but adapters and head: the policy's base is its trunk.
    """
    critic, lora = build_model(config, current_platform(), policy.vocab_size, "value"), critic_lora_of(config)
    if lora is not None:
        share_base(policy, critic)
        adapt(critic, config, lora, groups)
    elif config.critic.rl_critic_load_hf is not None:
        load_hf(read_model(config.critic.rl_critic_load_hf), critic, groups)
    else:
        copy_trunk(policy, critic)
    return Optimization(critic, critic_config(config))


def share_base(policy: PolicyModel, other: PolicyModel) -> None:
    """Let ``other`` have its weights in the policy's memory, but a value head; both are laid out alike."""
    has_value_head = any(parameter.is_value_head for parameter in other.layout.parameters)
    for own, theirs in zip(other.chunks, policy.chunks, strict=True):
        weights = dict(theirs.named_parameters())
        for name, parameter in own.named_parameters():
            if not (has_value_head and name.startswith("output_layer.")):
                parameter.data = weights[name].data


@torch.no_grad()
def copy_trunk(policy: PolicyModel, critic: PolicyModel) -> None:
    """Give the critic all of the policy's weights but the head; both are laid out alike."""
    weights, heads = dict(policy.named_parameters()), {p.name for p in critic.layout.parameters if p.is_value_head}
    for name, parameter in critic.named_parameters():
        if name not in heads:
            parameter.copy_(weights[name])


def read_first_weights(
    config: RLConfig, policy: PolicyModel, checkpoints: CheckpointManager, groups: ParallelGroups
) -> StartingWeights:
    """Fill the model with what a flag names, or leave the random weights it has; collective.

    Adapters come after it: new ones, or those of a checkpoint that has nothing else, whose base is read first.

    Raises:
        CheckpointError: what is read is damaged, or the base is not the one that the adapters were trained on.
    """
    origin, lora = first_weights(config)[1], lora_of(config)
    if lora is None:
        return _read(origin, policy, checkpoints, groups)
    trained = None
    if origin.kind == "checkpoint" and has_adapters(state := read_run_state(checkpoints.find(origin.path))):
        trained, origin = checkpoints.find(origin.path), state.origin
    if is_adapted(policy):  # an evaluation of several checkpoints, each of the same base
        found = replace(origin, weights=fingerprints(policy, groups))
    else:
        found = _read(origin, policy, checkpoints, groups)
        adapt(policy, config, lora, groups)
    if trained is not None:
        if not origin.is_of(found.weights):
            raise CheckpointError(_another_base(trained, found))
        checkpoints.start_from_weights(str(trained), policy)
    elif config.lora.load_lora is not None:
        load_peft(Path(config.lora.load_lora), policy, lora, family_weights(config), groups)
    return found


def end_tokens_of(origin: StartingWeights) -> Sequence[int]:
    """Return the end tokens of the run that the weights are from."""
    return read_run_state(Path(origin.path)).model.end_token_ids if origin.kind == "checkpoint" else ()


def _to_continue(config: RLConfig, checkpoints: CheckpointManager) -> Path | None:
    """The run's own newest checkpoint; where it has none yet, that of `--load`."""
    own = checkpoints.newest() if resumes(config) else None
    if own is not None:
        return own
    elsewhere = run_to_continue(config)
    return None if elsewhere is None else checkpoints.find(elsewhere[1])


def _read_again(
    config: RLConfig, directory: Path, policy: PolicyModel, checkpoints: CheckpointManager, groups: ParallelGroups
) -> StartingWeights:
    state = read_run_state(directory)
    wanted = reference_weights(config, directory, state)
    found = _read(wanted, policy, checkpoints, groups)
    if not wanted.weights:  # an earlier version saved it without them
        logger.warning("%s does not say what its run started from: the reference is %s", directory, found.path)
    elif not wanted.is_of(found.weights):
        raise CheckpointError(
            _another(directory, state, found) if lora_of(config) is None else _another_base(directory, found)
        )
    what = "reference policy" if lora_of(config) is None else "base of the adapters"
    logger.info("%s: %s", what, found.path or "the random weights that the run began with")
    return replace(found, weights={**wanted.weights, **found.weights})


def _another_base(directory: Path, found: StartingWeights) -> str:
    what = repr(found.path) if found.path else "the random weights of this --seed and number format"
    return (
        f"the adapters in {str(directory)!r} were trained on other weights than {what}; name a directory that has "
        "them with --load-hf or --pretrained-checkpoint"
    )


def _another(directory: Path, state: RunState, found: StartingWeights) -> str:
    if found.kind == "drawn":
        return (
            f"the run of {str(directory)!r} began with random weights (seed {state.seed}), which are the reference of "
            "--grpo-kl-beta, and this start draws others; use the same --seed and number format, or leave the flag out"
        )
    began_with = state.origin.path or "random weights"
    return (
        f"{found.path!r} has other weights than {began_with!r} had when the run of {str(directory)!r} began with them; "
        "they are the reference of --grpo-kl-beta: name a directory that has them with --pretrained-checkpoint or "
        "--load-hf, or leave the flag out"
    )


def _read(
    origin: StartingWeights, policy: PolicyModel, checkpoints: CheckpointManager, groups: ParallelGroups
) -> StartingWeights:
    """Fill the model from there; returns where exactly, and the fingerprint of what was found."""
    path = origin.path
    if origin.kind == "checkpoint":
        path = str(checkpoints.start_from_weights(path, policy))
    elif origin.kind == "hugging_face":
        load_hf(read_model(path), policy, groups)
    return replace(origin, path=path, weights=fingerprints(policy, groups))
