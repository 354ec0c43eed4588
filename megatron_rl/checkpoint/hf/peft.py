"""Adapters in and out: PEFT's files, and a whole Hugging Face model whose weights have the adapters in them."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_rl.atomic import whole_directory
from megatron_rl.checkpoint.hf.load import fill
from megatron_rl.checkpoint.hf.save import tensors_of, write_hf
from megatron_rl.checkpoint.layout import find_checkpoint
from megatron_rl.checkpoint.run_state import RunState, has_adapters, read_run_state
from megatron_rl.checkpoint.stored import open_weights, part_of_stored
from megatron_rl.errors import CheckpointError
from megatron_rl.families import HfModel, ModelLayout, Parameter, WeightMap
from megatron_rl.families.lora import Lora, adapters_of
from megatron_rl.families.peft import CONFIG_FILE, WEIGHTS_FILE, adapter_entries, config_of
from megatron_rl.models.adapters import low_rank_product
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.tensor_files import TensorReader, write_json

logger = logging.getLogger(__name__)


@torch.no_grad()
def load_peft(directory: Path, policy: PolicyModel, lora: Lora, weights: WeightMap, groups: ParallelGroups) -> None:
    """Fill the adapters of this rank; no communication.

    Raises:
        CheckpointError: the files are damaged.
    """
    entries = {parameter.name: (parameter, entry) for parameter, entry in adapter_entries(policy.layout, lora, weights)}
    with TensorReader(directory) as reader:
        for name, values in policy.named_parameters():
            if name in entries:
                parameter, entry = entries[name]
                fill(values, entry.pieces(parameter, groups.part_of(parameter)), reader)
    logger.info("adapters from %s", directory)


def adapters_of_checkpoint(path: str | Path, contents: bool = True) -> tuple[Path, RunState, Lora | None]:
    """Return the checkpoint that ``path`` means, and its adapters; None of one that has all weights.

    ``contents`` False compares no checksums.
    """
    directory = find_checkpoint(path, contents)
    state = read_run_state(directory)
    if not has_adapters(state):
        return directory, state, None
    rank, alpha, targets = (state.model.flags[f"lora_{name}"] for name in ("rank", "alpha", "targets"))
    return directory, state, Lora(rank, alpha, tuple(targets))


def export_peft(path: str | Path, origin: HfModel, target: Path) -> None:
    """Write the adapters of a checkpoint as ``peft`` reads them, in their own number format. No model is built.

    Raises:
        CheckpointError: there is no such checkpoint, it has no adapters, or ``target`` is there.
    """
    directory, _, lora = _with_adapters(path, target)
    layout, stored = ModelLayout.of(origin.architecture), open_weights(directory)
    tensors: dict[str, torch.Tensor] = {}
    for parameter, entry in adapter_entries(layout, lora, origin.weights):
        tensors |= tensors_of(entry, parameter, part_of_stored(stored, parameter))
    with whole_directory(target, origin.directory) as written:
        save_file(tensors, written / WEIGHTS_FILE, metadata={"format": "pt"})
        write_json(written / CONFIG_FILE, config_of(lora, adapters_of(layout, lora), str(origin.directory)))
    logger.info("wrote %s", target)


def export_merged(path: str | Path, origin: HfModel, target: Path, dtype: torch.dtype | None = None) -> None:
    """Write the base with the adapters in its weights: the sum in fp32, rounded once. No model is built.

    Raises:
        CheckpointError: as `export_peft`; or the base that the run began with is gone, or another now.
    """
    directory, state, lora = _with_adapters(path, target)
    layout, stored = ModelLayout.of(origin.architecture), open_weights(directory)
    parts = {f"decoder.{part.linear.name}.weight": part for part in adapters_of(layout, lora)}

    def merged(base: Callable[[Parameter], torch.Tensor], parameter: Parameter) -> torch.Tensor:
        values, part = base(parameter), parts.get(parameter.name)
        if part is None:
            return values
        a, b = (part_of_stored(stored, each).float() for each in (part.a, part.b))
        return values.float() + low_rank_product(part, a, b)

    if state.origin is None or state.origin.kind == "drawn":
        raise CheckpointError(f"{directory}: its run began with random weights, which are in no file to merge with")
    with TensorReader(origin.directory) as reader:
        base = partial(_of_hf, origin.weights, reader)
        if state.origin.kind == "checkpoint":
            base = partial(part_of_stored, open_weights(find_checkpoint(state.origin.path)))
        if f"{_fingerprint(layout, base):016x}" != state.origin.weights["bfloat16"]:
            where = state.origin.path if state.origin.kind == "checkpoint" else origin.directory
            raise CheckpointError(f"the adapters in {directory} were trained on other weights than {where} has now")
        write_hf(origin, target, layout, partial(merged, base), dtype)


def _with_adapters(path: str | Path, target: Path) -> tuple[Path, RunState, Lora]:
    if target.exists():
        raise CheckpointError(f"{target} exists; choose another directory")
    directory, state, lora = adapters_of_checkpoint(path)
    if lora is None:
        raise CheckpointError(f"{directory} has all weights and no adapters; leave out --format peft and --merge")
    return directory, state, lora


def _of_hf(weights: WeightMap, reader: TensorReader, parameter: Parameter) -> torch.Tensor:
    values = torch.empty(parameter.shape)
    fill(values, weights[parameter.name].pieces(parameter), reader)
    return values


def _fingerprint(layout: ModelLayout, base: Callable[[Parameter], torch.Tensor]) -> int:
    """That of `tensors.fingerprints` in bf16, parameter by parameter."""
    total = 0
    for parameter in layout.parameters:
        bits = base(parameter).to(torch.bfloat16).view(torch.int16)
        total += (zlib.crc32(parameter.name.encode()) | 1) * int(bits.sum(dtype=torch.int64))
    return total % 2**64
