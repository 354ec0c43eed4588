"""A Hugging Face directory as a checkpoint of ours: one process, no model, one parameter in memory at a time."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path
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
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megatron_rl.checkpoint.hf.load import fill
from megatron_rl.checkpoint.hf.reader import HfReader
from megatron_rl.checkpoint.hf.stored import stored_name
from megatron_rl.checkpoint.layout import commit, step_directory, temporary_directory
from megatron_rl.checkpoint.run_state import RunState, architecture_of, write_run_state
from megatron_rl.config import ModelConfig, RLConfig, TokenizerConfig, resolve
from megatron_rl.errors import CheckpointError
from megatron_rl.families import Architecture, HfModel, ModelLayout, Parameter
from megatron_rl.families.hf_config import end_token_ids
from megatron_rl.families.layout import padded_vocabulary

logger = logging.getLogger(__name__)


def import_hf(
    model: HfModel, root: Path, dtype: torch.dtype, vocab_divisible_by: int, tokenizer_size: int = 0
) -> Path:
    """Write ``root/step_0000000``, for `--pretrained-checkpoint`; any number of ranks can load it.

    Args:
        vocab_divisible_by: rows of the embedding are padded to a multiple of this; times the tensor-parallel size
            of the run, it is that run's own padding.
        tokenizer_size: tokens of the tokenizer, which a run is then held to; 0 leaves it open.

    Raises:
        CheckpointError: there is a checkpoint already, or the files are not of this model.
    """
    if step_directory(root, 0).exists():
        raise CheckpointError(f"{step_directory(root, 0)} exists; choose another directory")
    padded = padded_vocabulary(model.architecture.vocab_size, vocab_divisible_by)
    target = temporary_directory(root, 0)
    target.mkdir(parents=True, exist_ok=True)
    with HfReader(model.directory) as reader:
        _write_tensors(target, _Parameters(model, reader, dtype, padded))
    state = RunState(
        step=0,
        has_optimizer=False,
        vocab_size=tokenizer_size,
        end_token_ids=list(end_token_ids(model.directory)),
        padded_vocab_size=padded,
        architecture=architecture_of(_config(model.architecture)),
    )
    write_run_state(target, state)
    committed = commit(root, 0)
    logger.info("wrote %s", committed)
    return committed


class _Parameters:
    """The part of torch's ``SavePlanner`` that writing asks for: the numbers of an item, when their turn comes."""

    def __init__(self, model: HfModel, reader: HfReader, dtype: torch.dtype, padded_vocabulary: int) -> None:
        self._model, self._reader, self._dtype = model, reader, dtype
        self._layout = ModelLayout.of(model.architecture, padded_vocab_size=padded_vocabulary)
        self._weights = model.weights
        self._parameters: dict[MetadataIndex, Parameter] = {}
        self.described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}

    def items(self) -> Iterator[WriteItem]:
        """What there is to write. Also fills in ``described``, by name in the files."""
        for parameter in self._layout.parameters:
            key, place = stored_name(parameter.name)
            stacked, shape = self._stack(place), parameter.shape
            offsets = torch.Size([*place, *[0] * len(shape)])
            chunk = ChunkStorageMetadata(offsets, torch.Size([*[1] * len(place), *shape]))
            properties, size = TensorProperties(dtype=self._dtype), torch.Size([*stacked, *shape])
            described = self.described.setdefault(key, TensorStorageMetadata(properties, size, []))
            described.chunks.append(chunk)
            index = MetadataIndex(key, offsets)
            self._parameters[index] = parameter
            yield WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, size))
            if ".linear_" in parameter.name and parameter.name.endswith(".weight"):
                yield self._extra_state(key, place, stacked)

    def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Called by torch's writer for one item after the other."""
        if item.type == WriteItemType.BYTE_IO:
            content = io.BytesIO()
            torch.save([None], content)
            return content
        parameter = self._parameters[item.index]
        values = torch.empty(parameter.shape, dtype=self._dtype)
        fill(values, self._weights[parameter.name].pieces(parameter), self._reader)
        return values.view(item.tensor_data.chunk.sizes)

    def _extra_state(self, key: str, place: tuple[int, ...], stacked: tuple[int, ...]) -> WriteItem:
        """megatron's linears ask for a state beside the weight; without Transformer Engine it is empty."""
        here, of = (".".join(map(str, numbers)) for numbers in (place, stacked))
        name = f"{key.removesuffix('weight')}_extra_state/shard_{here}_{of}"
        self.described[name] = BytesStorageMetadata()
        return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)

    def _stack(self, place: tuple[int, ...]) -> tuple[int, ...]:
        architecture = self._model.architecture
        return (architecture.num_layers, architecture.num_experts or 0)[: len(place)]



def _write_tensors(directory: Path, parameters: _Parameters) -> None:
    writer = FileSystemWriter(directory, single_file_per_rank=True, thread_count=1, sync_files=False)
    writer.set_up_storage_writer(is_coordinator=True)
    (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(SavePlan(list(parameters.items())))])
    results: Any = writer.write_data(plan, parameters).wait()
    writer.finish(Metadata(parameters.described), [results])
    torch.save({}, directory / "common.pt")  # megatron's own writer of it wants a process group
    save_config(CheckpointingConfig("torch_dist", 1), str(directory))


def _config(architecture: Architecture) -> RLConfig:
    settings = architecture.settings()
    rows = settings.pop("vocab_size")
    config = RLConfig(
        model=ModelConfig(**settings, group_query_attention=True), tokenizer=TokenizerConfig(vocab_size=rows)
    )
    return resolve(config, 1)
