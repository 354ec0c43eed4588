"""What a checkpoint of a LoRA run holds of its model: adapters, and a critic's head. The base is only named in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_rl.families import Parameter
from megatron_rl.models.adapters import adapters_in
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.groups import current_groups

Sharded = ShardedTensor | ShardedTensorFactory


def is_adapted(policy: PolicyModel) -> bool:
    """Return whether the model has adapters, and its checkpoints nothing else."""
    return any(adapters_in(gpt) for gpt in policy.chunks)


def sharded_adapters(policy: PolicyModel) -> dict[str, Sharded]:
    """Return what this rank has of all that is trained, in megatron's words for which part of the whole it is.

    Experts, and the blocks of a gate and up projection, lie apart in the files: layouts cut them differently.
    """
    groups, found = current_groups(), {}
    for described, values in _trained(policy):
        first = described[0]
        rank, data = groups.part_of(first), groups.experts.data if first.is_of_an_expert else groups.rollout_group
        replica = (0, rank if first.cut is None else 0, data.rank())
        make, key = partial(_pieces, described, rank), _stored_name(first)
        if values.dim() == 2 and first.blocks == 1:
            (found[first.name],) = make(key, values, replica)
        else:
            join = _stacked if values.dim() == 3 else torch.cat
            found[first.name] = ShardedTensorFactory(key, values, make, join, replica_id=replica)
    return found


@torch.no_grad()
def take_adapters(policy: PolicyModel, state: dict[str, torch.Tensor]) -> None:
    """Fill the model with what was read in the form of `sharded_adapters`."""
    for described, values in _trained(policy):
        values.copy_(state[described[0].name])


def _trained(policy: PolicyModel) -> Iterator[tuple[Sequence[Parameter], torch.nn.Parameter]]:
    """Parameters, and what each is; of a stack what each of its experts is."""
    for adapter in (adapter for gpt in policy.chunks for adapter in adapters_in(gpt)):
        yield [part.a for part in adapter.parts], adapter.lora_a
        yield [part.b for part in adapter.parts], adapter.lora_b
    for head in (parameter for parameter in policy.layout.after if parameter.is_value_head):
        yield [head], policy.chunks[-1].output_layer.weight


def _stored_name(parameter: Parameter) -> str:
    return parameter.name.replace(".local_experts.", ".experts.")  # as megatron's files count experts


def _pieces(
    described: Sequence[Parameter], rank: int, key: str, values: torch.Tensor, replica: Any, _: Any = None
) -> list[Any]:
    """Block by block; of a stack a list for each expert. ``key``: of moments it begins with the optimizer's prefix."""
    first = described[0]
    if values.dim() == 3:
        keys = [key.replace(_stored_name(first), _stored_name(one)) for one in described]
        parts = zip(described, keys, values, strict=True)
        return [_pieces([one], rank, own, part, replica) for one, own, part in parts]
    # With one block the parameter itself: the optimizer finds its own by that.
    pieces, axis, found = values.chunk(first.blocks) if first.blocks > 1 else [values], int(first.cut == "columns"), []
    for index, piece in enumerate(pieces):
        place = (axis, rank + index * first.ranks, len(pieces) * first.ranks)
        cut = () if first.cut is None else (place,)
        found.append(ShardedTensor.from_rank_offsets(key, piece, *cut, replica_id=replica))
    return found


@torch.no_grad()
def _stacked(experts: list[list[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([torch.cat(pieces) for pieces in experts])
