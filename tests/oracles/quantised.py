"""Rollouts in 8 bits: the model with every linear layer of its decoder replaced by what the format says."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.oracles.formats import e4m3_values


def int8(values: torch.Tensor) -> torch.Tensor:
    """Every row rounded to whole steps of its largest number / 127."""
    scale = values.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return (values / scale).round() * scale


def fp8(values: torch.Tensor) -> torch.Tensor:
    """Every row rounded to E4M3 with its largest number at 448."""
    scale = values.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448
    grid = e4m3_values()
    grid = grid[grid.isfinite()].unique()
    wanted = values / scale
    after = torch.searchsorted(grid, wanted.contiguous()).clamp(1, len(grid) - 1)
    low, high = grid[after - 1], grid[after]
    return torch.where(wanted - low < high - wanted, low, high) * scale


ROUNDING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"int8": int8, "fp8": fp8}
"""A scale for every output channel of a weight and for every token of an activation."""


def quantise(model: torch.nn.Module, recipe: str) -> torch.nn.Module:
    """The same model, its decoder's linear layers in 8 bits; embedding, head and norms as they are."""
    rounded = ROUNDING[recipe]
    for layer in model.model.layers:
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                with torch.no_grad():
                    module.weight.copy_(rounded(module.weight))
                module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
    return model
