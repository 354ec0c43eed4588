"""Whole parameters into a checkpoint of ours, one at a time and without building the model.

The files are those of ``torch.distributed.checkpoint``. megatron stacks the layers of a decoder into one tensor
``[L, ...]`` a parameter, and their experts into ``[L, E, ...]``, and gives norms the names they have in fused layers.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megatron_rl.families import ModelLayout, Parameter

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_STORED_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def stored_name(parameter: str) -> tuple[str, tuple[int, ...]]:
    """Name in the files, and the parameter's place in what is stacked there: layer, or layer and expert."""
    layer = _LAYER.fullmatch(parameter)
    if layer is None:
        return parameter, ()
    expert = _EXPERT.fullmatch(layer[2])
    if expert is None:
        return f"decoder.layers.{_STORED_NAMES.get(layer[2], layer[2])}", (int(layer[1]),)
    return f"decoder.layers.mlp.experts.experts.{expert[2]}", (int(layer[1]), int(expert[1]))


def write_parameters(
    directory: Path, layout: ModelLayout, dtype: torch.dtype, make: Callable[[Parameter], torch.Tensor]
) -> None:
    """Write the files of a whole model (``tensor_size`` 1), whose parameters ``make`` gives when their turn comes."""
    model, items = layout.architecture, []
    linears = {f"decoder.{linear.name}.weight" for linear in layout.linears}
    parameters: dict[MetadataIndex, Parameter] = {}
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for parameter in layout.parameters:
        key, place = stored_name(parameter.name)
        stacked = (model.num_layers, model.num_experts or 0)[: len(place)]
        offsets = torch.Size([*place, *[0] * len(parameter.shape)])
        chunk = ChunkStorageMetadata(offsets, torch.Size([*[1] * len(place), *parameter.shape]))
        properties, size = TensorProperties(dtype=dtype), torch.Size([*stacked, *parameter.shape])
        described.setdefault(key, TensorStorageMetadata(properties, size, [])).chunks.append(chunk)
        index = MetadataIndex(key, offsets)
        parameters[index] = parameter
        items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, size)))
        if parameter.name in linears:
            # megatron's linears ask for a state beside the weight; without Transformer Engine it is empty.
            here, of = (".".join(map(str, numbers)) for numbers in (place, stacked))
            name = f"{key.removesuffix('weight')}_extra_state/shard_{here}_{of}"
            described[name] = BytesStorageMetadata()
            items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))

    def data(item: WriteItem) -> torch.Tensor | io.BytesIO:
        if item.type == WriteItemType.BYTE_IO:
            content = io.BytesIO()
            torch.save([None], content)
            return content
        return make(parameters[item.index]).to(dtype).view(item.tensor_data.chunk.sizes)

    writer = FileSystemWriter(directory, single_file_per_rank=True, thread_count=1, sync_files=False)
    writer.set_up_storage_writer(is_coordinator=True)
    (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(SavePlan(items))])
    # Of torch's ``SavePlanner`` writing asks for this alone: the numbers of an item, when their turn comes.
    results: Any = writer.write_data(plan, SimpleNamespace(resolve_data=data)).wait()
    writer.finish(Metadata(described), [results])
    torch.save({}, directory / "common.pt")  # megatron's own writer of it wants a process group
    save_config(CheckpointingConfig("torch_dist", 1), str(directory))
