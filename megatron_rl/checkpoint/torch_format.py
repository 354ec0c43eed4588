"""Resumes a run whose earlier version wrote one file a rank, in Megatron's format torch: only read here, never written.

`optimizer` has what is no tensor. `optimizer_state` has the tensors by their names in the whole model, not in the order
of this model's parameters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, merge
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base

from megatron_rl.checkpoint.saving import together
from megatron_rl.checkpoint.stored import load_weights
from megatron_rl.checkpoint.tensors import load_state, make_room, sharded_state
from megatron_rl.checkpoint.torch_files import MODEL_FILE, read_models, split_of
from megatron_rl.errors import CheckpointError
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.optimizer import Optimization


def load(directory: Path, policy: PolicyModel, groups: ParallelGroups, optimization: Optimization) -> None:
    """Load weights and the optimizer's state, in place; collective. Weights alone fit any topology: `load_weights`.

    Raises:
        CheckpointError: the checkpoint does not hold this model in this topology; on every rank.
    """
    make_room(optimization)
    load_weights(directory, policy, groups)
    load_state(optimization, together(lambda: _optimizer_state(directory, policy, groups, optimization)))


def _optimizer_state(
    directory: Path, policy: PolicyModel, groups: ParallelGroups, optimization: Optimization
) -> dict[str, Any]:
    """In the form that this model's optimizer takes."""
    own = split_of(directory).name(groups.tensor_group.rank(), groups.stage, groups.experts.parallel.rank())
    content = read_models(directory / own / MODEL_FILE, mapped=False)
    pieces, rest, stacks = load_preprocess(sharded_state(policy, optimization, loading=True)["optimizer"])
    pieces, _ = extract_sharded_base(pieces)
    found, state = content.get("optimizer_state", {}), content.get("optimizer", {})

    def taken(piece: ShardedTensor) -> torch.Tensor:
        tensor = found.get(piece_name(piece))
        if tensor is None or tensor.shape != piece.local_shape:
            raise CheckpointError(
                f"checkpoint {str(directory)!r} has no {piece_name(piece)} of {list(piece.local_shape)}; use the flags "
                "it was trained with, or --no-load-optim"
            )
        return tensor

    dict_list_map_inplace(taken, pieces)
    for part in (rest, pieces):
        merge(state, part)
    return apply_factory_merges(state, stacks)


def piece_name(piece: ShardedTensor) -> str:
    """And where it lies in the whole tensor. Example, layer 1 and expert 3:
    ``optimizer.state.exp_avg.decoder.layers.mlp.experts.experts.linear_fc2.weight@1.3.0.0``.
    """
    return f"{piece.key}@{'.'.join(map(str, piece.global_offset))}"
