"""Parameters out of a torch_dist directory, ours or Megatron-LM's, without building a model.

The files are those of ``torch.distributed.checkpoint``. megatron stacks the layers of a decoder into one tensor
``[L, ...]`` a parameter and their experts into ``[L, E, ...]``, or, where layers differ, counts them in the name.
"""

from __future__ import annotations

import itertools
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_rl.errors import CheckpointError, one_line
from megatron_rl.families import Parameter
from megatron_rl.families.layout import own_name

_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_EXPERT = re.compile(r"mlp\.experts\.experts\.(?:(\d+)\.)?(.+)")
OF_CRITIC = "critic."
"""Ahead of a critic's names in the files: whoever knows of no critic finds the policy's names as ever."""
_NO_WEIGHT = re.compile(rf"{re.escape(OF_CRITIC)}|(chained_\d+\.)?optimizer\.")
"""Beginnings of what is no weight of the policy."""
_HALVES = ("_w", "_v")
"""Endings of gate and up projection, where they are stored apart."""
_DESCRIBING = {
    metadata: (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    planner: ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
    filesystem: ("_StorageInfo", "_StoragePrefix"),
}  # fmt: skip
"""What a ``.metadata`` file consists of, besides sizes and number formats."""


class _Older:
    """In place of megatron-core's classes of up to 0.15, which only hold attributes."""


@dataclass
class _Block:
    """One stored tensor's part that belongs to one parameter."""

    key: str
    place: tuple[int, ...]
    """Layer, or layer and expert, in what is stacked."""
    whole: TensorStorageMetadata
    chunks: list[ChunkStorageMetadata] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.whole.size[len(self.place) :])


class DistFiles:
    """The weights in a torch_dist directory; see `StoredWeights`.

    Raises:
        CheckpointError: ``.metadata`` cannot be read, or a file that it names is absent or too short.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._reader = directory, FileSystemReader(directory)
        described = _read_metadata(directory / ".metadata")
        _check_files(directory, described)
        self._reader.set_up_storage_reader(described, is_coordinator=True)
        self._found: dict[str, dict[str, _Block]] = {}
        for key, stored in described.state_dict_metadata.items():
            is_weight = isinstance(stored, TensorStorageMetadata) and not _NO_WEIGHT.match(key)
            for chunk in stored.chunks if is_weight and not key.endswith("_extra_state") else ():
                for name, place in _parameters(key, chunk):
                    half = key[-2:] if key.endswith(_HALVES) else ""
                    blocks = self._found.setdefault(name, {})
                    blocks.setdefault(half, _Block(key, place, stored)).chunks.append(chunk)

    @property
    def names(self) -> set[str]:
        """Of all parameters."""
        return set(self._found)

    def shape(self, parameter: Parameter) -> tuple[int, ...]:
        """Of the whole parameter."""
        blocks = self._found[parameter.name].values()
        height, *width = next(iter(blocks)).shape
        return (height * len(blocks), *width)

    def dtype(self, name: str) -> torch.dtype:
        """The stored number format."""
        return next(iter(self._found[name].values())).whole.properties.dtype

    def read(self, parameter: Parameter, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop`` of the whole parameter; columns where it is cut by columns.

        Raises:
            CheckpointError: a file cannot be read.
        """
        blocks, by_columns, offset, found = self._found[parameter.name], parameter.cut == "columns", 0, []
        for block in (blocks[half] for half in ("", *_HALVES) if half in blocks):
            size = block.shape[1 if by_columns else 0]
            first, last = max(start, offset) - offset, min(stop, offset + size) - offset
            if first < last:
                found.append(self._read(block, 1 if by_columns else 0, first, last))
            offset += size
        return torch.cat(found)

    def _read(self, block: _Block, dimension: int, start: int, stop: int) -> torch.Tensor:
        offsets, sizes = [0] * len(block.shape), list(block.shape)
        offsets[dimension], sizes[dimension] = start, stop - start
        target = torch.empty([*[1] * len(block.place), *sizes], dtype=block.whole.properties.dtype)
        wanted = ChunkStorageMetadata(torch.Size([*block.place, *offsets]), target.shape)
        nearby = TensorStorageMetadata(block.whole.properties, block.whole.size, block.chunks)
        items = create_read_items_for_chunk_list(block.key, nearby, [wanted])

        def place_of(item: ReadItem) -> torch.Tensor:
            ends = map(sum, zip(item.dest_offsets, item.lengths, strict=True))
            return target[tuple(map(slice, item.dest_offsets, ends))]

        # Of torch's ``LoadPlanner`` reading asks for this alone: where each stored block goes, here a view.
        into: Any = SimpleNamespace(resolve_tensor=place_of, commit_tensor=lambda *_: None)
        try:
            self._reader.read_data(LoadPlan(items), into).wait()
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(
                f"checkpoint {str(self._directory)!r}: {block.key} cannot be read ({one_line(str(error), 200)})"
            ) from error
        return target.view(sizes)


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


class _Unpickler(pickle.Unpickler):
    """``.metadata`` is a pickle, which can run code: torch's reader makes whatever it names, this one no more than
    what sizes and places consist of.
    """

    def find_class(self, module: str, name: str) -> Any:
        for known, names in _DESCRIBING.items():
            if name in names and (module == known.__name__ or module.endswith("sharded_tensor.metadata")):
                return getattr(known, name)
        if module == "megatron.core.dist_checkpointing.strategies.torch" and name.startswith("MCore"):
            return _Older
        if (module, name) in (("torch", "Size"), ("torch.serialization", "_get_layout")):
            return super().find_class(module, name)
        if module.partition(".")[0] == "pathlib" and name == "PosixPath":  # where it was written, once
            return PurePosixPath
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not allowed, and nothing of it was executed")


def _read_metadata(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return _Unpickler(file).load()
    except Exception as error:  # a pickle that is cut short raises almost anything
        raise CheckpointError(f"checkpoint file {str(path)!r} cannot be read ({one_line(str(error), 200)})") from error


def _check_files(directory: Path, described: Any) -> None:
    ends: dict[str, int] = {}
    for place in described.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in sorted(ends.items()):
        path = directory / name
        if not path.is_file():
            raise CheckpointError(f"checkpoint file {str(path)!r} is missing, .metadata names it")
        if path.stat().st_size < end:
            raise CheckpointError(
                f"checkpoint file {str(path)!r} is cut short: it has {path.stat().st_size} bytes of {end}"
            )
