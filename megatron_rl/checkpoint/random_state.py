"""Random-number state of each rank, as plain tensors.

Rollouts do not need it (their draws are counter-based); dropout and third-party code might.
"""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors.torch import load_file, save_file

_TRACKER = "tracker."


def _path(directory: Path, rank: int) -> Path:
    return directory / f"random_state_rank_{rank:05d}.safetensors"


def save_random_state(directory: Path, rank: int) -> None:
    """Write this rank's generators."""
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    for name, state in get_cuda_rng_tracker().get_states().items():
        if torch.is_tensor(state):
            tensors[_TRACKER + name] = state.clone()
    save_file(tensors, str(_path(directory, rank)))


def load_random_state(directory: Path, rank: int) -> bool:
    """Restore this rank's generators; False when the saving job had no such rank."""
    path = _path(directory, rank)
    if not path.is_file():
        return False
    tensors = load_file(str(path))
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    states.update(
        {name.removeprefix(_TRACKER): state for name, state in tensors.items() if name.startswith(_TRACKER)}
    )
    tracker.set_states(states)
    return True
