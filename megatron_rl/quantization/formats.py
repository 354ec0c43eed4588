"""The arithmetic of quantisation: scales, rounding, codes. Eager torch on any device.

This is the definition; the Triton kernels must give the same codes. A number is ``code x scale`` with fp32 scales,
shared by a row (channel or token), a tile, or a whole tensor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional

from megatron_rl.arithmetic import TILE

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
INT8_MAX = 127.0
AMAX_FLOOR = 1e-12
"""Lower bound of maxima, so that a group of zeros has a nonzero scale."""
_SIGN_AND_CODE = 0x87F00000 - 2**32


def scale_of(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """Return fp32 ``max(amax, AMAX_FLOOR) / largest``, which maps the group's largest number to the largest code."""
    bounded = amax.float().clamp_min(AMAX_FLOOR)
    if bounded.is_cuda:  # there torch divides by a Python number as it multiplies by the reciprocal: an ulp apart
        return bounded / bounded.new_full((), largest)
    return bounded / largest


def power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """Return the smallest power of two not below ``scale`` (positive, normal fp32).

    By bit arithmetic: a carry out of the mantissa raises the exponent. A cast to float8_e8m0fnu would round to nearest
    and could shrink a scale, so that the largest code overflows.
    """
    bits = scale.contiguous().view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def fp8_codes(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return E4M3 codes of ``values / scale``, to nearest even; clamped, because older torch casts large ones to NaN.
    """
    return (values.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def integer_codes(values: torch.Tensor, scale: torch.Tensor, largest: float = INT8_MAX) -> torch.Tensor:
    """Return int8 codes of ``values / scale``, rounded to nearest even, within ``[-largest, largest]``."""
    return (values.float() / scale).round_().clamp_(-largest, largest).to(torch.int8)


def row_amax(values: torch.Tensor) -> torch.Tensor:
    """Map [..., K] to the largest magnitude of each row, fp32 [..., 1]."""
    return values.abs().amax(-1, keepdim=True).float()


def tiles(weight: torch.Tensor) -> torch.Tensor:
    """Split [N, K] into [ceil(N / TILE), TILE, ceil(K / TILE), TILE], zero-padded."""
    rows, columns = weight.shape
    padded = functional.pad(weight, (0, -columns % TILE, 0, -rows % TILE))
    return padded.view(padded.shape[0] // TILE, TILE, padded.shape[1] // TILE, TILE)


def segments(values: torch.Tensor) -> torch.Tensor:
    """Split [T, K] into [T, ceil(K / TILE), TILE], zero-padded."""
    return functional.pad(values, (0, -values.shape[-1] % TILE)).unflatten(-1, (-1, TILE))


def fp8_rounded(values: torch.Tensor) -> torch.Tensor:
    """Round fp32 ``values``, at most 464 in magnitude, to E4M3 numbers; fp32.

    Equal to ``values.to(FP8).float()``, which is slow on a CPU: adding and subtracting 1.5 x 2^20 times a number's own
    power of two leaves 3 bits behind the leading one. Below 2^-6 the step stays 2^-9.
    """
    exponent = (values.view(torch.int32) & 0x7F800000).clamp_min_((127 - 6) << 23).view(torch.float32)
    magic = exponent.mul_(1.5 * 2**20)
    return (values + magic).sub_(magic)


def fp8_numbers(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``codes.to(dtype)``; on a CPU 10 times faster than the cast.

    Exponent and mantissa, placed in fp32's lowest exponent bits, are the number times 2^-120, also for subnormals.
    """
    if codes.is_cuda:
        return codes.to(dtype)
    bits = codes.view(torch.int8).to(torch.int32).bitwise_left_shift_(20).bitwise_and_(_SIGN_AND_CODE)
    numbers = bits.view(torch.float32).mul_(2.0**120)
    if numbers.numel() and max(bound.abs() for bound in numbers.aminmax()) > FP8_MAX:
        numbers.masked_fill_(numbers.abs() > FP8_MAX, float("nan"))  # the one code that is no number
    return numbers.to(dtype)


def smoothing_factors(channel_amax: torch.Tensor, weight_amax: torch.Tensor) -> torch.Tensor:
    """Return SmoothQuant's ``sqrt(max|x_j| / max|w_j|)`` [K] fp32, else 1 (https://arxiv.org/abs/2211.10438, eq. 4)."""
    factors = (channel_amax / weight_amax).sqrt()
    return torch.where(factors.isfinite() & (factors > 0), factors, torch.ones_like(factors))
