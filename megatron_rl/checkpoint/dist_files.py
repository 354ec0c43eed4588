"""Parameters out of a torch_dist directory, ours or Megatron-LM's, and into one of ours, without building a model.

The files are those of ``torch.distributed.checkpoint``. megatron stacks the layers of a decoder into one tensor
``[L, ...]`` a parameter and their experts into ``[L, E, ...]``, or, where layers differ, counts them in the name.
Norms have the names that they have in Transformer Engine's fused layers.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_rl.checkpoint.pickled import described, read
from megatron_rl.errors import CheckpointError, one_line
from megatron_rl.families import ModelLayout, Parameter
from megatron_rl.families.layout import own_name

_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_EXPERT = re.compile(r"mlp\.experts\.experts\.(?:(\d+)\.)?(.+)")
OF_CRITIC = "critic."
"""Ahead of a critic's names in the files: whoever knows of no critic finds the policy's names as ever."""
_NO_WEIGHT = re.compile(rf"{re.escape(OF_CRITIC)}|(chained_\d+\.)?optimizer\.")
"""Beginnings of what is no weight of the policy."""
_HALVES = ("_w", "_v")
"""Endings of gate and up projection, where they are stored apart, gate first."""
_FUSED_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
_COMMON, _COMMON_ENTRY = "common.pt", "common_state/shard_0_1"
"""Where megatron-core keeps what is no tensor: in a file, from 0.19 on among the tensors."""


@dataclass
class _Block:
    """One stored tensor's part that belongs to one parameter."""

    place: tuple[int, ...]
    """Layer, or layer and expert, in what is stacked."""
    whole: TensorStorageMetadata
    chunks: list[ChunkStorageMetadata] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.whole.size[len(self.place) :])


class DistFiles:
    """A torch_dist directory: weights by their names in the whole model, all else by its name in the files.

    Nothing in it can run code, see `pickled`.

    Raises:
        CheckpointError: ``.metadata`` cannot be read, or a file that it names is absent or too short.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._reader = directory, FileSystemReader(directory)
        self._found: dict[str, dict[str, _Block]] = {}
        self._places: dict[str, set[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        """Tensor -> first numbers and shapes of its chunks."""
        with described(directory / ".metadata") as content:
            _check_files(directory, content.storage_data)
            self._stored = content.state_dict_metadata
            self._reader.set_up_storage_reader(content, is_coordinator=True)
            for key, stored in self._stored.items():
                is_weight = isinstance(stored, TensorStorageMetadata) and not _NO_WEIGHT.match(key)
                for chunk in stored.chunks if is_weight and not key.endswith("_extra_state") else ():
                    for name, place in _parameters(key, chunk):
                        blocks = self._found.setdefault(name, {})
                        blocks.setdefault(key, _Block(place, stored)).chunks.append(chunk)

    @property
    def names(self) -> set[str]:
        """List the names of all parameters."""
        return set(self._found)

    def shape(self, parameter: Parameter) -> tuple[int, ...]:
        """Return the shape of the unsharded parameter."""
        blocks = self._found[parameter.name].values()
        height, *width = next(iter(blocks)).shape
        return (height * len(blocks), *width)

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored number format."""
        return next(iter(self._found[name].values())).whole.properties.dtype

    def read(self, parameter: Parameter, start: int, stop: int) -> torch.Tensor:
        """Read rows ``start`` to ``stop`` of the whole parameter; columns where it is cut by columns.

        Raises:
            CheckpointError: a file cannot be read.
        """
        dimension, offset, found = 1 if parameter.cut == "columns" else 0, 0, []
        for key, block in sorted(self._found[parameter.name].items(), reverse=True):  # _w comes before _v
            size = block.shape[dimension]
            first, last = max(start, offset) - offset, min(stop, offset + size) - offset
            if first < last:
                found.append(self._read(key, block, dimension, first, last))
            offset += size
        return torch.cat(found)

    def _read(self, key: str, block: _Block, dimension: int, start: int, stop: int) -> torch.Tensor:
        offsets, sizes = [0] * len(block.shape), list(block.shape)
        offsets[dimension], sizes[dimension] = start, stop - start
        target = torch.empty([*[1] * len(block.place), *sizes], dtype=block.whole.properties.dtype)
        nearby = TensorStorageMetadata(block.whole.properties, block.whole.size, block.chunks)
        self._copy(key, nearby, [*block.place, *offsets], target)
        return target.view(sizes)

    def fill(self, target: torch.Tensor, key: str, offsets: Sequence[int], whole: Sequence[int] | None) -> None:
        """Read the part of a stored tensor that begins at ``offsets`` into ``target``.

        Args:
            whole: shape of the stored tensor; None takes any, and what is not stored stays as it is in ``target``.

        Raises:
            CheckpointError: there is none of this shape, or it cannot be read.
        """
        stored, wanted = self._stored.get(key), ChunkStorageMetadata(torch.Size(offsets), target.shape)
        fits = isinstance(stored, TensorStorageMetadata) and whole in (None, tuple(stored.size))
        if fits and key not in self._places:
            self._places[key] = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks}
        if fits and (tuple(offsets), tuple(target.shape)) in self._places[key]:  # else maybe thousands are looked at
            stored = TensorStorageMetadata(stored.properties, stored.size, [wanted])
        if not fits or (self._copy(key, stored, offsets, target) < target.numel() and whole is not None):
            raise misfit(self._directory, f"it has no {key} of shape {list(target.shape if whole is None else whole)}")

    def common(self) -> dict[str, Any]:
        """Read what is the same on all ranks and no tensor; ``CheckpointError`` if it cannot be read."""
        index = MetadataIndex(_COMMON_ENTRY)
        if index not in self._reader.storage_data:
            return read(self._directory / _COMMON, mapped=False)
        place = self._reader.storage_data[index]
        with open(self._directory / place.relative_path, "rb") as file:
            file.seek(place.offset)
            content = io.BytesIO(file.read(place.length))
        (common,) = read(content, False, f"checkpoint {str(self._directory)!r}: {_COMMON_ENTRY}")
        return common

    def _copy(self, key: str, stored: TensorStorageMetadata, offsets: Sequence[int], target: torch.Tensor) -> int:
        """Return how many numbers were there."""
        wanted = ChunkStorageMetadata(torch.Size(offsets), target.shape)

        def place_of(item: ReadItem) -> torch.Tensor:
            ends = map(sum, zip(item.dest_offsets, item.lengths, strict=True))
            return target[tuple(map(slice, item.dest_offsets, ends))]

        # Of torch's ``LoadPlanner`` reading asks for this alone: where each stored block goes, here a view.
        into: Any = SimpleNamespace(resolve_tensor=place_of, commit_tensor=lambda *_: None)
        try:
            items = create_read_items_for_chunk_list(key, stored, [wanted])
            self._reader.read_data(LoadPlan(items), into).wait()
        except Exception as error:  # of damaged contents torch raises almost anything
            raise CheckpointError(
                f"checkpoint {str(self._directory)!r}: {key} cannot be read ({one_line(str(error), 200)})"
            ) from error
        return sum(math.prod(item.lengths) for item in items)


def misfit(directory: Path, reason: str) -> CheckpointError:
    """Make the error of a checkpoint that holds another model."""
    what = f"checkpoint {str(directory)!r}"
    return CheckpointError(f"{what} does not fit this model ({reason}); use the flags it was trained with")


def _parameters(key: str, chunk: ChunkStorageMetadata) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names of the parameters that a chunk has a part of, and their places in what is stacked."""
    name = own_name(key[:-2] if key.endswith(_HALVES) else key)
    layer = _LAYER.fullmatch(name)
    if layer is None:
        yield name, ()
        return
    expert = _EXPERT.fullmatch(layer[2])
    is_stacked = [layer[1] is None] + ([expert[1] is None] if expert else [])
    ranges = [range(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True)]
    for place in itertools.product(*ranges[: sum(is_stacked)]):
        numbers = iter(place)
        number = next(numbers) if is_stacked[0] else layer[1]
        rest = layer[2]
        if expert:
            rest = f"mlp.experts.local_experts.{next(numbers) if is_stacked[1] else expert[1]}.{expert[2]}"
        yield f"decoder.layers.{number}.{rest}", place


def _check_files(directory: Path, places: dict[MetadataIndex, Any]) -> None:
    ends: dict[str, int] = {}
    for place in places.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in sorted(ends.items()):
        path = directory / name
        if path.parent != directory:
            raise ValueError(f"it names {name}, which is no file beside it")
        if not path.is_file():
            raise CheckpointError(f"checkpoint file {str(path)!r} is missing, .metadata names it")
        if path.stat().st_size < end:
            raise CheckpointError(
                f"checkpoint file {str(path)!r} is cut short: it has {path.stat().st_size} bytes of {end}"
            )


# -- writing -----------------------------------------------------------------------------------------


def write_parameters(
    directory: Path, layout: ModelLayout, dtype: torch.dtype, make: Callable[[Parameter], torch.Tensor]
) -> None:
    """Write the files of a whole model (``tensor_size`` 1), whose parameters ``make`` gives when their turn comes."""
    model, items = layout.architecture, []
    are_alike = len({kind.mlp for kind in model.kinds}) == 1 and not any(kind.mixer == "delta" for kind in model.kinds)
    linears = {f"decoder.{linear.name}.weight" for linear in layout.linears}
    parameters: dict[MetadataIndex, Parameter] = {}
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for parameter in layout.parameters:
        key, place = _stored_name(parameter.name, are_alike)
        stacked = (model.num_layers, model.num_experts or 0)[0 if are_alike else 1 :][: len(place)]
        offsets = torch.Size([*place, *[0] * len(parameter.shape)])
        chunk = ChunkStorageMetadata(offsets, torch.Size([*[1] * len(place), *parameter.shape]))
        number = torch.float32 if parameter.is_stored_in_fp32 else dtype
        properties, size = TensorProperties(dtype=number), torch.Size([*stacked, *parameter.shape])
        described.setdefault(key, TensorStorageMetadata(properties, size, [])).chunks.append(chunk)
        index = MetadataIndex(key, offsets)
        parameters[index] = parameter
        items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, size)))
        if parameter.name in linears:
            # megatron's linears ask for a state beside the weight; without Transformer Engine it is empty.
            here, of = (".".join(map(str, numbers)) for numbers in (place or (0,), stacked or (1,)))
            name = f"{key.removesuffix('weight')}_extra_state/shard_{here}_{of}"
            described[name] = BytesStorageMetadata()
            items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))

    def data(item: WriteItem) -> torch.Tensor | io.BytesIO:
        if item.type == WriteItemType.BYTE_IO:
            content = io.BytesIO()
            torch.save([None], content)
            return content
        return make(parameters[item.index]).to(item.tensor_data.properties.dtype).view(item.tensor_data.chunk.sizes)

    writer = FileSystemWriter(directory, single_file_per_rank=True, thread_count=1, sync_files=False)
    writer.set_up_storage_writer(is_coordinator=True)
    (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(SavePlan(items))])
    # Of torch's ``SavePlanner`` writing asks for this alone: the numbers of an item, when their turn comes.
    results: Any = writer.write_data(plan, SimpleNamespace(resolve_data=data)).wait()
    writer.finish(Metadata(described), [results])
    write_common(directory, {})


def write_common(directory: Path, common: Mapping[str, Any]) -> None:
    """Write what stands beside the tensors; megatron's own writer of it wants a process group."""
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

    torch.save(dict(common), directory / _COMMON)
    save_config(CheckpointingConfig("torch_dist", 1), str(directory))


def _stored_name(parameter: str, are_alike: bool) -> tuple[str, tuple[int, ...]]:
    """Name in the files, and the parameter's place in what is stacked there: layer, or layer and expert.

    Where some layers have experts and some have none, they are not stacked but counted in the name.
    """
    layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(?:mlp\.experts\.local_experts\.(\d+)\.)?(.+)", parameter)
    if layer is None:
        return parameter, ()
    start, place = ("decoder.layers", (int(layer[1]),)) if are_alike else (f"decoder.layers.{layer[1]}", ())
    if layer[2]:
        return f"{start}.mlp.experts.experts.{layer[3]}", (*place, int(layer[2]))
    return f"{start}.{_FUSED_NAMES.get(layer[3], layer[3])}", place
