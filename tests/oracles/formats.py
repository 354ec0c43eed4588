"""Exported 8-bit weights against the formats' definitions; numbers of E4M3 from its bits, not from torch's casts."""

from __future__ import annotations

import math

import torch

TILE = 128
SLACK = 1e-5
"""Relative: fp32 quotients near the middle of two codes may fall to either side; measured: 6e-8."""


def e4m3_values() -> torch.Tensor:
    """[256] fp64: sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinity, NaN with all seven bits set."""

    def value(code: int) -> float:
        sign, exponent, mantissa = -1.0 if code >> 7 else 1.0, (code >> 3) & 15, code & 7
        if exponent == 15 and mantissa == 7:
            return math.nan
        if exponent == 0:
            return sign * mantissa / 8 * 2.0**-6
        return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)

    return torch.tensor([value(code) for code in range(256)], dtype=torch.float64)


def code_values(stored: torch.Tensor) -> torch.Tensor:
    """The numbers that stored codes stand for, fp64: int8 or the bits of E4M3."""
    if stored.dtype == torch.int8:
        return stored.double()
    return e4m3_values()[stored.view(torch.uint8).long()]


def spread(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Scales [N, 1] or [ceil(N / 128), ceil(K / 128)] at every element of the weight, fp64."""
    if scales.shape == (shape[0], 1):
        return scales.double().expand(shape)
    rows, columns = torch.arange(shape[0]) // TILE, torch.arange(shape[1]) // TILE
    return scales.double()[rows][:, columns]


def problems(weight: torch.Tensor, stored: torch.Tensor, scales: torch.Tensor, powers_of_two: bool) -> list[str]:
    """What is wrong with the codes and scales of one weight."""
    tiles = (-(-weight.shape[0] // TILE), -(-weight.shape[1] // TILE))
    if scales.shape not in ((weight.shape[0], 1), tiles) or scales.dtype != torch.float32:
        return [f"scales are {tuple(scales.shape)} {scales.dtype}"]
    if not bool((scales > 0).all() and scales.isfinite().all()):
        return ["a scale is not a positive number"]
    codes, scale, weight = code_values(stored), spread(scales, weight.shape), weight.double()
    if not bool(codes.isfinite().all()):
        return ["a code is NaN"]
    grid = torch.arange(-127.0, 128.0).double() if stored.dtype == torch.int8 else e4m3_values()
    grid = grid[grid.isfinite()].unique()
    found = _wrong_scales(weight, scales, grid.max(), powers_of_two)
    wanted = weight / scale
    # The distance to the nearest of all codes: nobody's rounding is trusted.
    after = torch.searchsorted(grid, wanted).clamp(1, len(grid) - 1)
    nearest = torch.minimum((wanted - grid[after - 1]).abs(), (wanted - grid[after]).abs())
    off = (codes - wanted).abs() > nearest + SLACK * wanted.abs()
    if bool(off.any()):
        found.append(f"{int(off.sum())} codes are not the nearest")
    return found


def _wrong_scales(weight: torch.Tensor, scales: torch.Tensor, top: torch.Tensor, powers_of_two: bool) -> list[str]:
    """The largest number of a row or tile has the largest code; with powers of two the next scale above that."""
    by_row = scales.shape == (weight.shape[0], 1)
    height, width = (1, weight.shape[1]) if by_row else (TILE, TILE)
    found = []
    for i, row in enumerate(weight.abs().split(height)):
        for j, tile in enumerate(row.split(width, dim=1)):
            exact, seen = float(tile.max() / top), float(scales[i, j])
            if exact == 0:
                continue
            expected = 2.0 ** math.ceil(math.log2(exact)) if powers_of_two else exact
            if abs(seen - expected) > 1e-6 * expected:
                found.append(f"scale {i}, {j} is {seen:.8g}, {expected:.8g} expected")
    return found
