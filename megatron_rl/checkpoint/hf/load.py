"""`--load-hf`: every rank fills its parameters with the slices they consist of."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from megatron_rl.checkpoint.hf.reader import HfReader
from megatron_rl.checkpoint.torch_files import own_name
from megatron_rl.errors import CheckpointError
from megatron_rl.families import HfModel, Piece
from megatron_rl.models import PolicyModel
from megatron_rl.parallel import ParallelGroups

logger = logging.getLogger(__name__)


def load_hf(model: HfModel, policy: PolicyModel, groups: ParallelGroups) -> int:
    """Fill this rank's part of the model; returns the bytes read. No communication.

    Rows of the embedding beyond the tensors' are zero.

    Raises:
        CheckpointError: the files are damaged, or are not of this model.
    """
    weights, filled = model.weights, set()
    with HfReader(model.directory) as reader, torch.no_grad():
        shared = {parameter.name: parameter for parameter in policy.layout.parameters}
        for given, parameter in policy.gpt.named_parameters():
            name = own_name(given)
            if name not in weights:
                raise CheckpointError(f"{model.directory}: {model.family.class_name} has nothing for parameter {name}")
            fill(parameter, weights[name].pieces(shared[name], groups.tensor_rank), reader)
            filled.add(name)
    left = [name for name in weights if name not in filled]
    if left:
        raise CheckpointError(f"{model.directory}: this model has no parameter {left[0]} for the tensors of it")
    logger.info("weights from %s: %.1f MiB read by this rank", model.directory, reader.bytes_read / 2**20)
    return reader.bytes_read


def fill(parameter: torch.Tensor, pieces: Iterable[Piece], reader: HfReader) -> None:
    """Lay ``pieces`` under one another into ``parameter``, in its number format and on its device."""
    pieces = list(pieces)
    height = sum(piece.height for piece in pieces)
    if height != parameter.shape[0]:
        raise CheckpointError(f"{height} rows of {pieces[0].tensor} for a parameter of {parameter.shape[0]}")
    start = 0
    for piece in pieces:
        target = parameter[start : start + piece.height]
        if piece.tensor is None:
            target.zero_()
        else:
            target.copy_(reader.read(piece))
        start += piece.height
