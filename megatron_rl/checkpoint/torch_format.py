"""`--ckpt-format torch`: model and optimizer of each rank of one model copy, as they lie in its memory.

With experts over ranks, of the copies that share them: all that step together with the first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.models.gpt import GPTModel

from megatron_rl.atomic import sync
from megatron_rl.checkpoint.saving import SaveAttempt, together
from megatron_rl.checkpoint.tensors import load_state, make_room, named_chunks, sharded_state
from megatron_rl.checkpoint.torch_files import MODEL_FILE, Split, read_models, topology_problems
from megatron_rl.errors import CheckpointError
from megatron_rl.families.layout import own_name
from megatron_rl.models import PolicyModel
from megatron_rl.parallel import ParallelGroups
from megatron_rl.trainer import Optimization

_VERSION = 3.0
"""Megatron's number for the order of rows in fused projections."""
_STATE = "optimizer_state"


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
    content: dict[str, Any] = {"checkpoint_version": _VERSION, "iteration": step}
    content |= {name: gpt.state_dict() for name, gpt in named_chunks(policy).items()}
    if optimization is not None:
        content |= _state_by_names(policy, optimization)
    if not groups.is_with_main:
        return
    with attempt.part():
        target = _rank_directory(directory, groups)
        target.mkdir()
        _write(content, target / MODEL_FILE)
        sync(target)


def _split(groups: ParallelGroups) -> Split:
    return Split.of(
        {
            "tensor_model_parallel_size": groups.tensor_size,
            "pipeline_model_parallel_size": groups.pipeline_group.size(),
            "expert_model_parallel_size": groups.expert_parallel_group.size(),
            "expert_tensor_parallel_size": groups.expert_tensor_group.size(),
        }
    )


def _rank_directory(directory: Path, groups: ParallelGroups) -> Path:
    return directory / _split(groups).name(groups.tensor_rank, groups.stage, groups.expert_parallel_group.rank())


def _write(content: Any, path: Path) -> None:
    try:
        torch.save(content, path)
    except RuntimeError as error:  # torch's writer makes one of a full disk
        raise OSError(f"{path}: {error}") from error


def load(directory: Path, policy: PolicyModel, groups: ParallelGroups, optimization: Optimization) -> None:
    """Load weights and the optimizer's state, in place; collective. Weights alone fit any topology: `load_weights`.

    Raises:
        CheckpointError: the checkpoint does not hold this model in this topology; on every rank.
    """
    content = together(lambda: _read_fitting(directory, policy, groups))
    make_room(optimization)
    for name, gpt in named_chunks(policy).items():
        gpt.load_state_dict(content[name], strict=False)  # compared already; what is left out is empty
    load_state(optimization, together(lambda: _with_own_order(directory, content, policy, optimization)))


def _read_fitting(directory: Path, policy: PolicyModel, groups: ParallelGroups) -> dict[str, Any]:
    """This rank's file, whose tensors are those of this rank's chunks."""
    for problem in topology_problems(directory, _split(groups)):
        raise CheckpointError(problem)
    content = read_models(_rank_directory(directory, groups) / MODEL_FILE, mapped=False)
    if _STATE not in content:
        raise CheckpointError(
            f"checkpoint {str(directory)!r} has the optimizer's state as an earlier version wrote it; add "
            "--no-load-optim"
        )
    chunks = named_chunks(policy)
    if any(name not in content for name in chunks) or f"model{len(chunks)}" in content:
        raise CheckpointError(
            f"checkpoint {str(directory)!r} has other chunks of layers a stage than this model's {len(chunks)}; use "
            "the --num-virtual-stages-per-pipeline-rank it was trained with"
        )
    return content | {name: _fitting(directory, content[name], gpt) for name, gpt in chunks.items()}


def _fitting(directory: Path, tensors: dict[str, torch.Tensor], gpt: GPTModel) -> dict[str, torch.Tensor]:
    """Those of a chunk, by the names it gives them."""
    found = {name: tensor.shape for name, tensor in tensors.items() if not name.endswith("_extra_state")}
    state = {name: tensor for name, tensor in gpt.state_dict().items() if torch.is_tensor(tensor)}
    names = {own_name(name): name for name in state if not name.endswith("_extra_state")}
    own = {name: state[given].shape for name, given in names.items()}
    for name in sorted(own.keys() | found.keys()):
        if own.get(name) != found.get(name):
            has, wants = (list(shapes[name]) if name in shapes else "none" for shapes in (found, own))
            raise CheckpointError(
                f"checkpoint {str(directory)!r} does not fit this model ({name}: it has {has}, the model wants "
                f"{wants}); use the flags it was trained with"
            )
    return {given: tensors[name] for name, given in names.items()}


# -- the optimizer's state: its tensors by their names in the whole model, not in the order that this model has them ---


def _state_by_names(policy: PolicyModel, optimization: Optimization) -> dict[str, Any]:
    """What a file has of it; collective."""
    state = sharded_state(policy, optimization, loading=False)["optimizer"]
    pieces, rest = save_preprocess(state, validate_access_integrity=False)
    return {"optimizer": rest, _STATE: {_name(piece): piece.data for piece in nested_values(pieces)}}


def _with_own_order(
    directory: Path, content: dict[str, Any], policy: PolicyModel, optimization: Optimization
) -> dict[str, Any]:
    """The reverse, for this model's parameters."""
    pieces, rest, stacks = load_preprocess(sharded_state(policy, optimization, loading=True)["optimizer"])
    pieces, _ = extract_sharded_base(pieces)
    found, state = content[_STATE], content["optimizer"]

    def taken(piece: ShardedTensor) -> torch.Tensor:
        tensor = found.get(_name(piece))
        if tensor is None:
            raise CheckpointError(
                f"checkpoint {str(directory)!r} has no {_name(piece)} of {list(piece.local_shape)}; use the flags it "
                "was trained with, or --no-load-optim"
            )
        return tensor

    dict_list_map_inplace(taken, pieces)
    for part in (rest, pieces):
        merge(state, part)
    return apply_factory_merges(state, stacks)


def _name(piece: ShardedTensor) -> str:
    """And where it lies in the whole tensor. Example, layer 1 and expert 3:
    ``optimizer.state.exp_avg.decoder.layers.mlp.experts.experts.linear_fc2.weight@1.3.0.0``.
    """
    return f"{piece.key}@{'.'.join(map(str, piece.global_offset))}"
