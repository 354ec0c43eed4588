"""`--ckpt-format torch`: every tensor-parallel rank's model and optimizer as they lie in its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_rl.atomic import sync
from megatron_rl.checkpoint.run_state import read_run_state
from megatron_rl.checkpoint.saving import SaveAttempt, together
from megatron_rl.checkpoint.tensors import distributed_parts, load_state, make_room
from megatron_rl.checkpoint.torch_files import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    rank_directory,
    read,
    read_model_file,
    topology_problems,
)
from megatron_rl.errors import CheckpointError
from megatron_rl.families.layout import own_name
from megatron_rl.models import PolicyModel
from megatron_rl.parallel import ParallelGroups
from megatron_rl.trainer import Optimization

_VERSION = 3.0
"""Megatron's number for the order of rows in fused projections."""


def save(
    directory: Path,
    step: int,
    policy: PolicyModel,
    optimization: Optimization | None,
    groups: ParallelGroups,
    attempt: SaveAttempt,
) -> None:
    """Write this job's files into ``directory``; collective. None leaves the optimizer out.

    What a rank could not write is noted in ``attempt``.
    """
    content: dict[str, Any] = {"checkpoint_version": _VERSION, "iteration": step, "model": policy.gpt.state_dict()}
    gathered = None
    if optimization is not None:
        gathered = _gather_parameter_state(optimization)
        content["optimizer"] = optimization.optimizer.state_dict()
    if groups.data_rank != 0:
        return
    with attempt.part():
        target = rank_directory(directory, groups.tensor_rank)
        target.mkdir()
        _write(content, target / MODEL_FILE)
        if gathered is not None:
            _write(gathered, target / OPTIMIZER_FILE)
        sync(target)


def _write(content: Any, path: Path) -> None:
    try:
        torch.save(content, path)
    except RuntimeError as error:  # torch's writer makes one of a full disk
        raise OSError(f"{path}: {error}") from error


def load(
    directory: Path, policy: PolicyModel, groups: ParallelGroups, optimization: Optimization | None = None
) -> None:
    """Load weights, and the optimizer's state unless it is None, in place; collective.

    Raises:
        CheckpointError: the checkpoint does not hold this model in this topology; on every rank.
    """
    content, gathered = together(lambda: _read(directory, policy, groups, optimization))
    if optimization is not None:
        make_room(optimization)
    policy.gpt.load_state_dict(content["model"], strict=False)  # compared already; what is left out is empty
    if optimization is not None:
        parts = gathered if isinstance(gathered, list) else [gathered] * len(distributed_parts(optimization))
        load_state(optimization, content["optimizer"], parts)


def _read(
    directory: Path, policy: PolicyModel, groups: ParallelGroups, optimization: Optimization | None
) -> tuple[dict[str, Any], Any]:
    content = _read_fitting(directory, policy, groups, mapped=optimization is None)
    if optimization is None:
        return content, None
    if policy.config.transformer_impl == "transformer_engine":
        raise CheckpointError(
            f"checkpoint {str(directory)!r} keeps the optimizer's state in the order of megatron's own layers, which "
            "--transformer-impl transformer_engine changes; take its weights alone with --pretrained-checkpoint"
        )
    ranks = read_run_state(directory).world.get("ranks", groups.world_size)
    if ranks != groups.world_size:
        raise CheckpointError(
            f"checkpoint {str(directory)!r} was saved by {ranks} ranks, this run has {groups.world_size}; "
            f"--ckpt-format torch holds one topology: start {ranks} ranks, or take its weights alone with "
            "--pretrained-checkpoint"
        )
    if "optimizer" not in content:
        raise CheckpointError(f"checkpoint {str(directory)!r} has no optimizer state; add --no-load-optim")
    is_first = groups.data_rank == 0 and bool(distributed_parts(optimization))
    path = rank_directory(directory, groups.tensor_rank) / OPTIMIZER_FILE
    return content, read(path) if is_first else None


def _read_fitting(directory: Path, policy: PolicyModel, groups: ParallelGroups, mapped: bool) -> dict[str, Any]:
    """This rank's file, whose tensors are those of this rank's model."""
    for problem in topology_problems(directory, groups.tensor_size):
        raise CheckpointError(problem)
    content = read_model_file(directory, groups.tensor_rank, mapped)
    found = {name: tensor.shape for name, tensor in content["model"].items() if not name.endswith("_extra_state")}
    state = {name: tensor for name, tensor in policy.gpt.state_dict().items() if torch.is_tensor(tensor)}
    names = {own_name(name): name for name in state if not name.endswith("_extra_state")}
    own = {name: state[given].shape for name, given in names.items()}
    for name in sorted(own.keys() | found.keys()):
        if own.get(name) != found.get(name):
            has, wants = (list(shapes[name]) if name in shapes else "none" for shapes in (found, own))
            raise CheckpointError(
                f"checkpoint {str(directory)!r} does not fit this model ({name}: it has {has}, the model wants "
                f"{wants}); use the flags it was trained with"
            )
    return content | {"model": {given: content["model"][name] for name, given in names.items()}}


def _gather_parameter_state(optimization: Optimization) -> Any:
    """What Megatron-LM writes as `OPTIMIZER_FILE`, on data-parallel rank 0; None on the others. Collective."""
    if not distributed_parts(optimization):
        return None
    states = [part.get_parameter_state_dp_zero() for part in distributed_parts(optimization)]
    return states[0] if len(states) == 1 or states[0] is None else states
