"""What a recipe has learned about the activations: small fp32 vectors a rank, in a safetensors file of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from megatron_rl.errors import CheckpointError


def _path(directory: Path, rank: int) -> Path:
    return directory / f"rollout_calibration_{rank:05d}.safetensors"


def save_calibration(directory: Path, rank: int, vectors: Mapping[str, torch.Tensor]) -> None:
    """Write this rank's vectors; no file where there are none."""
    if vectors:
        save_file({name: vector.cpu().contiguous() for name, vector in vectors.items()}, _path(directory, rank))


def load_calibration(directory: Path, rank: int) -> dict[str, torch.Tensor]:
    """The vectors of this rank; empty where none were saved.

    Raises:
        CheckpointError: the file cannot be read.
    """
    path = _path(directory, rank)
    if not path.exists():
        return {}
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint file {str(path)!r} cannot be read ({error})") from error
