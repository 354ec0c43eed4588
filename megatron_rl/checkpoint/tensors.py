"""Weights and optimizer state through megatron's ``dist_checkpointing``: any topology loads what any other saved."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding, extract_sharded_base
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

from megatron_rl.checkpoint.adapters import is_adapted, sharded_adapters, take_adapters
from megatron_rl.checkpoint.dist_files import OF_CRITIC, DistFiles, misfit
from megatron_rl.checkpoint.optimizer_state import by_part, load_state, make_room, moments_in_fp32, parameters_in_place
from megatron_rl.checkpoint.saving import ResultQueue, succeed_on_all_ranks
from megatron_rl.errors import one_line
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.models.parameters import sum_over_model
from megatron_rl.platform.device import is_out_of_memory
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.platform.megatron import asynchronous_writer, use_result_queue
from megatron_rl.quantization.copies import as_numbers
from megatron_rl.trainer.optimizer import Optimization

_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
_WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""Bytes of a number -> what its bits are added up as."""
SUMMED_AT_ONCE, SUMMED_BY_A_GPU = 2**16, 2**28
"""Numbers. torch converts them to 64 bits before it adds: of a whole weight that was a copy of twice its size."""


Model = tuple[PolicyModel, Optimization | None]
"""And its optimizer, if its state is saved or loaded."""


def save_tensors(
    directory: Path,
    policy: PolicyModel,
    optimization: Optimization | None,
    in_background: bool = False,
    critic: Model | None = None,
) -> AsyncRequest | None:
    """Write this job's tensors into ``directory``; collective. None leaves the optimizer out.

    With ``in_background`` nothing is written: what would write is returned, for a process to run.
    """
    use_result_queue(ResultQueue)
    state = _states((policy, optimization), critic, loading=False)
    return dist_checkpointing.save(state, str(directory), async_sharded_save=in_background, **asynchronous_writer())


def load(
    directory: Path, policy: PolicyModel, optimization: Optimization | None = None, critic: Model | None = None
) -> None:
    """Load weights, and the optimizer's state unless it is None, in place; collective.

    Raises:
        CheckpointError: the checkpoint does not hold this model.
    """
    for _, part in filter(None, ((policy, optimization), critic)):
        if part is not None:
            make_room(part)
    state = _states((policy, optimization), critic, loading=True)
    state = succeed_on_all_ranks(lambda: _read(directory, state))
    with _fitting(directory):
        _take(state, policy, optimization)
        if critic is not None:
            _take(state["critic"], *critic)


def _take(state: dict[str, Any], policy: PolicyModel, optimization: Optimization | None) -> None:
    if is_adapted(policy):
        take_adapters(policy, state["model"])
    else:
        for name, gpt in named_chunks(policy).items():
            gpt.load_state_dict(state[name])
    if optimization is not None:
        load_state(optimization, by_part(state["optimizer"], optimization))


def _states(policy: Model, critic: Model | None, loading: bool) -> dict[str, Any]:
    state = sharded_state(*policy, loading)
    if critic is not None:
        state["critic"] = sharded_state(*critic, loading)
        add_prefix_for_sharding(state["critic"], OF_CRITIC)
    return state


def sharded_state(policy: PolicyModel, optimization: Optimization | None, loading: bool) -> dict[str, Any]:
    """Return this rank's sharded state in megatron's form; collective."""
    metadata = ensure_metadata_has_dp_cp_group(dict(_METADATA))
    # Names in the files are those of the whole model: that of a chunk keeps chunks apart in memory alone.
    state: dict[str, Any] = (
        {"model": sharded_adapters(policy)}
        if is_adapted(policy)
        else {name: gpt.sharded_state_dict(metadata=metadata) for name, gpt in named_chunks(policy).items()}
    )
    if optimization is not None:
        models = state["model"] if len(state) == 1 else dict(state)
        with parameters_in_place(optimization.optimizer), moments_in_fp32(optimization):
            state["optimizer"] = optimization.optimizer.sharded_state_dict(
                models, is_loading=loading, metadata=metadata
            )
    if policy.fp8_weights is not None:
        main_values = as_numbers if loading else policy.fp8_weights.main_values
        for piece in nested_values({name: state[name] for name in named_chunks(policy)}):
            if is_float8tensor(getattr(piece, "data", None)):
                piece.data = main_values(piece.data)
    return state


def named_chunks(policy: PolicyModel) -> dict[str, GPTModel]:
    """Return the chunks by Megatron's names: model, or model0, model1, ..."""
    if len(policy.chunks) == 1:
        return {"model": policy.chunks[0]}
    return {f"model{index}": gpt for index, gpt in enumerate(policy.chunks)}


def _read(directory: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Fill the ``state`` as ``dist_checkpointing.load`` does, which would execute what pickles in the files name."""
    files = DistFiles(directory)
    pieces, rest, stacks = load_preprocess(state)
    pieces, _ = extract_sharded_base(pieces)
    with _fitting(directory):
        common = files.common()
        dict_list_map_inplace(partial(_stored, files), pieces)
        for part in (rest, pieces):
            merge(common, part)
        return apply_factory_merges(common, stacks)


@torch.no_grad()
def _stored(files: DistFiles, piece: ShardedBase) -> Any:
    if isinstance(piece, ShardedObject):
        # Of a linear layer, for scales of fp8 that outlive a step, which no recipe here has; nothing else is stored so.
        # Transformer Engine keeps a pickle in it and executes it, so the file's is never taken.
        return piece.data
    piece.init_data("cpu")
    piece.data = piece.data.detach()
    if piece.allow_shape_mismatch:  # only the vocabulary is padded
        piece.data.zero_()
    whole = None if piece.allow_shape_mismatch else piece.global_shape
    files.fill(piece.data[(None,) * piece.prepend_axis_num], piece.key, piece.global_offset, whole)
    return piece.data


@contextlib.contextmanager
def _fitting(directory: Path) -> Iterator[None]:
    """Name the checkpoint in whatever megatron-core raises for values that do not fit the model."""
    try:
        yield
    except (CheckpointingException, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        raise misfit(directory, one_line(f"{type(error).__name__}: {error}", 200)) from error


# -- which weights they are ------------------------------------------------------------------------


def fingerprints(policy: PolicyModel, groups: ParallelGroups, with_adapters: bool = False) -> dict[str, str]:
    """Return fingerprints of the model's weights by number format; collective in a model copy.

    A run in bf16 knows that of bf16 alone, one in fp32 both: so the two can be compared.
    """
    formats = {policy.dtype, torch.bfloat16}
    return {
        str(dtype).removeprefix("torch."): f"{weights_fingerprint(policy, groups, dtype, with_adapters):016x}"
        for dtype in sorted(formats, key=str)
    }


def weights_fingerprint(
    policy: PolicyModel, groups: ParallelGroups, dtype: torch.dtype | None = None, with_adapters: bool = True
) -> int:
    """Return a sum of all weights' bit patterns, modulo 2^64: another update gives another number.

    The same in every parallel layout, however the vocabulary is padded and the norms are called. Collective in a model
    copy. Reads the device once.

    Args:
        dtype: numbers are rounded to it first; None takes them as they are.
    """
    over_the_vocabulary = {one.name for one in policy.layout.parameters if one.is_over_the_vocabulary}

    def share(name: str, values: torch.Tensor) -> torch.Tensor:
        total = torch.zeros([], dtype=torch.int64, device=values.device)
        if not with_adapters and ".adapter." in name:
            return total
        if name in over_the_vocabulary:
            values = values[: max(0, policy.vocab_size - groups.tensor_group.rank() * len(values))]
        for part in values.reshape(-1).split(SUMMED_AT_ONCE if values.is_cpu else SUMMED_BY_A_GPU):
            numbers = part.to(dtype or part.dtype)
            total += numbers.view(_WHOLE_NUMBERS[numbers.element_size()]).sum(dtype=torch.int64)
        return (zlib.crc32(name.encode()) | 1) * total

    return int(sum_over_model(policy.chunks, groups, share)) % 2**64
