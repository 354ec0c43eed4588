"""Writes a model as a Hugging Face directory, a parameter at a time."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.atomic import TEMPORARY, remove, whole_directory
from megatron_rl.checkpoint.hf.torch_dist import StoredParameters
from megatron_rl.checkpoint.layout import find_checkpoint
from megatron_rl.checkpoint.run_state import differences, read_run_state
from megatron_rl.checkpoint.torch_files import is_megatron_layout, shards_reader, tensor_size
from megatron_rl.errors import CheckpointError
from megatron_rl.families import Entry, HfModel, ModelLayout, Parameter
from megatron_rl.models import PolicyModel
from megatron_rl.parallel import ParallelGroups
from megatron_rl.parallel.collectives import broadcast_json, gather_json
from megatron_rl.tensor_files import TensorEntry, TensorWriter, plan_files, write_index, write_json

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 5 * 10**9
COPIED_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""What a directory has besides ``config.json`` and weights; copied where it is there."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NUMBERS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

Produce = Callable[[str], Sequence[torch.Tensor]]
"""A parameter's name -> its parts on all tensor-parallel ranks, in rank order."""


def save_hf(
    policy: PolicyModel, origin: HfModel, target: Path, groups: ParallelGroups, dtype: torch.dtype | None = None
) -> None:
    """Write the model in memory; collective over the job. ``origin`` gives ``config.json`` and the tokenizer.

    Args:
        dtype: of the numbers; None takes what the origin's ``config.json`` says.

    Raises:
        CheckpointError: ``target`` exists.
    """
    if broadcast_json(target.exists() if groups.is_main else None, source=0):
        raise CheckpointError(f"{target} exists; choose another directory")
    layout = policy.layout
    whole = ModelLayout.of(layout.architecture, layout.tensor_size, layout.padded_vocab_size)
    known = {parameter.name: parameter for parameter in whole.parameters}
    parameters = dict(policy.named_parameters())
    stages = enumerate(gather_json([*parameters], groups.pipeline_group))
    # A tied one is the first stage's.
    stage_of = {name: stage for stage, names in reversed([*stages]) for name in names}

    def gathered(name: str) -> Sequence[torch.Tensor]:
        if stage_of[name] == groups.stage:
            shards = _gather(parameters[name].detach(), groups)
        else:
            shape = known[name].local_shape
            shards = [torch.empty(shape, dtype=policy.dtype, device=policy.device) for _ in range(groups.tensor_size)]
        for shard in shards if stage_of[name] > 0 and groups.tensor_rank == 0 else ():
            if groups.stage == 0:
                dist.recv(shard, group=groups.pipeline_group, group_src=stage_of[name])
            elif groups.stage == stage_of[name]:
                dist.send(shard.contiguous(), group=groups.pipeline_group, group_dst=0)
        return shards

    if groups.is_main:
        write_hf(origin, target, whole, gathered, dtype)
    elif groups.data_rank == 0:  # the others of rank 0's copy
        for name in known:
            gathered(name)
    dist.barrier()


def export_checkpoint(path: str | Path, origin: HfModel, target: Path, dtype: torch.dtype | None = None) -> None:
    """Write what one of our checkpoints holds, whatever its topology. One process; no model is built.

    Memory holds one parameter and its tensors.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged or of another model, or ``target`` is there.
    """
    directory, model = find_checkpoint(path), origin.architecture
    state, means = read_run_state(directory), f"{origin.directory / 'config.json'} means"
    problems = differences(directory, state, model, means)
    rows = state.padded_vocab_size
    if rows < model.vocab_size:
        problems.append(f"checkpoint {str(directory)!r} has an embedding of {rows} rows, {means} {model.vocab_size}")
    if problems:
        raise CheckpointError("; ".join(problems))
    if is_megatron_layout(directory):
        size, produce = tensor_size(directory), shards_reader(directory)
    else:
        stored = StoredParameters(directory)
        size, produce = 1, lambda name: [stored.read(name)]
    write_hf(origin, target, ModelLayout.of(model, size, rows), produce, dtype)


def write_hf(
    origin: HfModel, target: Path, layout: ModelLayout, produce: Produce, dtype: torch.dtype | None = None
) -> None:
    """Write ``target`` from the parameters that ``produce`` gives; in place only once it is complete."""
    remove(target.with_name(target.name + TEMPORARY))
    weights, dtype = origin.weights, dtype or dtype_of(origin)
    entries = {name: TensorEntry(_NUMBERS[dtype], shape) for name, shape in weights.tensors.items()}
    files = plan_files(entries, MAX_FILE_BYTES)
    with whole_directory(target, origin.directory) as directory:
        with TensorWriter(directory, files) as writer:
            for parameter in layout.parameters:
                shards = produce(parameter.name)
                for name, tensor in tensors_of(weights[parameter.name], parameter, shards).items():
                    writer.append(name, tensor.to(dtype))
        if len(files) > 1:
            write_index(directory, files)
        _write_config(origin, directory, dtype)
        for name in COPIED_FILES:
            if (origin.directory / name).is_file():
                shutil.copyfile(origin.directory / name, directory / name)
    logger.info("wrote %s", target)


def tensors_of(entry: Entry, parameter: Parameter, shards: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The Hugging Face tensors of a parameter, from its parts on all tensor-parallel ranks."""
    if parameter.cut is None:
        shards = shards[:1]
    found = {name: torch.empty(shape, dtype=shards[0].dtype) for name, shape in entry.tensors.items()}
    for rank, shard in enumerate(shards):
        start = 0
        for piece in entry.pieces(parameter, rank):
            if piece.tensor is not None:
                target = found[piece.tensor][slice(*piece.rows)]
                block = shard[start : start + piece.height]
                (target if piece.columns is None else target[:, slice(*piece.columns)]).copy_(block)
            start += piece.height
    return found


def dtype_of(origin: HfModel) -> torch.dtype:
    """The number format ``config.json`` speaks of; fp32 where it does not."""
    return _DTYPES.get(origin.config.get("dtype", origin.config.get("torch_dtype")), torch.float32)


def _write_config(origin: HfModel, directory: Path, dtype: torch.dtype) -> None:
    if dtype == dtype_of(origin):
        shutil.copyfile(origin.directory / "config.json", directory / "config.json")
        return
    key = "torch_dtype" if "torch_dtype" in origin.config else "dtype"
    write_json(directory / "config.json", {**origin.config, key: str(dtype).removeprefix("torch.")})


def _gather(shard: torch.Tensor, groups: ParallelGroups) -> Sequence[torch.Tensor]:
    """All tensor-parallel parts on the group's first rank; what the others get is of no use."""
    if groups.tensor_size == 1:
        return [shard]
    shard = shard.contiguous()
    parts = [torch.empty_like(shard) for _ in range(groups.tensor_size)] if groups.tensor_rank == 0 else None
    dist.gather(shard, parts, group_dst=0, group=groups.tensor_group)
    return parts or [shard]
