"""Read a checkpoint without a model, to compare two of them bit for bit."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def contents(checkpoint: Path) -> dict[str, Any]:
    """Every tensor and number, by a dotted name: weights, moments, step counters, learning rates, random states."""
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = Path(folder) / "whole.pt"
        dcp_to_torch_save(checkpoint, whole)
        found = dict(_leaves("", torch.load(whole, weights_only=False)))
    if (checkpoint / "common.pt").exists():  # from megatron-core 0.19 on it is among the tensors
        found |= _leaves("common", torch.load(checkpoint / "common.pt", weights_only=False))
    for path in sorted(checkpoint.glob("state_rank_*.safetensors")):
        found |= {f"{path.stem}.{name}": tensor for name, tensor in load_file(path).items()}
    return found


def differences(one: Path, other: Path) -> list[str]:
    """Names of what is not exactly equal in two checkpoints; run_state.json's fields included, but no settings."""
    left, right = contents(one), contents(other)
    for found, state in ((left, state_of(one)), (right, state_of(other))):
        state.get("components", {}).pop("settings", None)
        found |= {f"run_state.{name}": value for name, value in state.items()}
    different = [name for name in left.keys() & right.keys() if not _equal(left[name], right[name])]
    return sorted([*different, *(left.keys() ^ right.keys())])


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The model's tensors."""
    return {
        name: value
        for name, value in contents(checkpoint).items()
        if torch.is_tensor(value) and not name.startswith(("optimizer", "common", "state_rank"))
    }


def state_of(checkpoint: Path) -> dict[str, Any]:
    """``run_state.json``."""
    return json.loads((checkpoint / "run_state.json").read_text())


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{name}.{key}".removeprefix("."), item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(f"{name}.{index}", item)
    else:
        yield name, value


def _equal(left: Any, right: Any) -> bool:
    if torch.is_tensor(left) and torch.is_tensor(right):
        return left.dtype == right.dtype and torch.equal(left, right)
    return left == right
