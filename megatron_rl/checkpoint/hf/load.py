"""Hugging Face in: `--load-hf` fills a rank's parameters with the slices they consist of, `import_hf` a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_rl import mxfp4
from megatron_rl.checkpoint.dist_files import write_parameters
from megatron_rl.checkpoint.layout import commit, step_directory, temporary_directory
from megatron_rl.checkpoint.run_state import (
    ModelFacts,
    RunState,
    StartingWeights,
    architecture_of,
    lasting,
    write_run_state,
)
from megatron_rl.errors import CheckpointError
from megatron_rl.families import HfModel, ModelLayout, Parameter, Piece
from megatron_rl.families.architecture import padded_vocabulary
from megatron_rl.families.hf_config import end_token_ids
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.tensor_files import TensorReader

logger = logging.getLogger(__name__)


def load_hf(model: HfModel, policy: PolicyModel, groups: ParallelGroups) -> int:
    """Fill this rank's part of the model; returns the bytes read. No communication. A critic's head stays as it is.

    Rows of the embedding beyond the tensors' are zero.

    Raises:
        CheckpointError: the files are damaged, or are not of this model.
    """
    weights = model.weights
    held = {parameter.name: parameter for parameter in policy.layout.parameters if not parameter.is_value_head}
    known = {parameter.name for parameter in ModelLayout.of(policy.layout.architecture).parameters}
    if others := (held.keys() - weights.keys()) | (weights.keys() - known):
        raise CheckpointError(f"{model.directory} is of another model: only one of the two has {min(others)}")
    with TensorReader(model.directory) as reader, torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name in held:
                fill(parameter, weights[name].pieces(held[name], groups.part_of(held[name])), reader)
    of_held = (tensor for name in held for tensor in weights[name].tensors if not held[name].is_buffer)
    stored = {tensor: reader.stored[tensor].dtype for tensor in of_held if tensor in reader.stored}
    rounded = [tensor for tensor, dtype in stored.items() if dtype == "F32"]
    if policy.dtype == torch.bfloat16 and 0 < len(rounded) < len(stored):
        logger.warning("%s: %s and %d other tensors are fp32 beside bf16 ones; this run rounds them to bf16",
                       model.directory, rounded[0], len(rounded) - 1)  # fmt: skip
    logger.info("weights from %s: %.1f MiB read by this rank", model.directory, reader.bytes_read / 2**20)
    return reader.bytes_read


def fill(parameter: torch.Tensor, pieces: Iterable[Piece], reader: TensorReader) -> None:
    """Lay ``pieces`` under one another into ``parameter``, in its number format and on its device."""
    pieces = list(pieces)
    height = sum(piece.height for piece in pieces)
    if height != parameter.shape[0]:
        raise CheckpointError(f"{height} rows of {pieces[0].tensor} for a parameter of {parameter.shape[0]}")
    start, together = 0, dict[Piece, torch.Tensor]()
    for piece in pieces:
        target = parameter[start : start + piece.height]
        if piece.tensor is None:
            target.zero_()
        else:
            target.copy_(_numbers(piece, reader, together))
        start += piece.height


def _numbers(piece: Piece, reader: TensorReader, together: dict[Piece, torch.Tensor]) -> torch.Tensor:
    """Those of a piece; rows that take turns with another piece's are read ``together``."""
    if piece.step == 1:
        return _read(piece, reader)
    first, last = piece.rows[0] // piece.step * piece.step, -(-piece.rows[1] // piece.step) * piece.step
    whole = replace(piece, rows=(first, last), step=1)
    if whole not in together:
        together[whole] = _read(whole, reader)
    return together[whole][piece.rows[0] - first :: piece.step]


def _read(piece: Piece, reader: TensorReader) -> torch.Tensor:
    if piece.transposed and piece.index is not None and mxfp4.is_stored(piece.tensor, reader):
        return mxfp4.read(reader, piece.tensor, piece.index, piece.rows, piece.columns)
    rows, columns = (piece.columns, piece.rows) if piece.transposed else (piece.rows, piece.columns)
    part = reader.read(piece.tensor, rows, columns, piece.index)
    return part.t() if piece.transposed else part


def import_hf(
    model: HfModel,
    root: Path,
    dtype: torch.dtype,
    vocab_divisible_by: int,
    tokenizer_size: int = 0,
    tokenizer: str | None = None,
) -> Path:
    """Write ``root/step_0000000``, for `--pretrained-checkpoint`; any number of ranks can load it.

    One process; no model is built, and memory holds one parameter.

    Args:
        vocab_divisible_by: rows of the embedding are padded to a multiple of this; times the tensor-parallel size
            of the run, it is that run's own padding.
        tokenizer_size: tokens of the tokenizer, which a run is then held to; 0 leaves it open.
        tokenizer: directory or name of the one that a run takes if it names no other; None: the model's own.

    Raises:
        CheckpointError: there is a checkpoint already, or the files are not of this model.
    """
    if step_directory(root, 0).exists():
        raise CheckpointError(f"{step_directory(root, 0)} exists; choose another directory")
    layout = ModelLayout.of(
        model.architecture, padded_vocab_size=padded_vocabulary(model.architecture.vocab_size, vocab_divisible_by)
    )
    target, weights = temporary_directory(root, 0), model.weights
    target.mkdir(parents=True, exist_ok=True)
    with TensorReader(model.directory) as reader:

        def make(parameter: Parameter) -> torch.Tensor:
            values = torch.empty(parameter.shape, dtype=torch.float32 if parameter.is_stored_in_fp32 else dtype)
            fill(values, weights[parameter.name].pieces(parameter), reader)
            return values

        write_parameters(target, layout, dtype, make)
    facts = ModelFacts(
        architecture=architecture_of(model.architecture),
        flags=_flags_of(model, tokenizer),
        vocab_size=tokenizer_size,
        padded_vocab_size=layout.padded_vocab_size,
        end_token_ids=list(end_token_ids(model.directory)),
    )
    origin = StartingWeights.at("hugging_face", str(model.directory))
    write_run_state(target, RunState(step=0, model=facts, has_optimizer=False, origin=origin))
    committed = commit(root, 0)
    logger.info("wrote %s", committed)
    return committed


def _flags_of(model: HfModel, tokenizer: str | None) -> dict[str, Any]:
    shape = model.architecture
    if tokenizer is None and (model.directory / "tokenizer_config.json").is_file():
        tokenizer = str(model.directory)
    return {
        "norm_epsilon": shape.norm_epsilon,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        **({} if tokenizer is None else {"tokenizer_model": lasting(tokenizer)}),
    }
