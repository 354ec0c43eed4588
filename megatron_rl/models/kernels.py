"""Triton kernels between a decoder layer's products, for rollouts on CUDA; twins in `rollout_ops`.

`add_norm` and `gate_up`: one program per row, written as numbers, or as codes and scales for the next product.
`rotate_store`: heads of a decode step: query and key norms, rotation, and storing in the cache. Training uses `gate_up`
too; its gradient is here.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from megatron_rl.quantization import formats
from megatron_rl.quantization.dependent_launch import dependent, wait
from megatron_rl.quantization.kernels import FEW_ROWS, codes_of, e4m3_of, magnitude_bits, scale_of
from megatron_rl.quantization.recipe import PackedActivations, Packing

_TILE, _LARGEST = tl.constexpr(formats.TILE), tl.constexpr(formats.FP8_MAX)
_PIECE = 1024
"""Columns per program where a row may be split: a decode batch has too few rows to fill a GPU."""


def add_norm(
    residual: torch.Tensor, output: torch.Tensor | None, bias: torch.Tensor | None, weight: torch.Tensor,
    epsilon: float, packing: Packing | None, summed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | PackedActivations]:  # fmt: skip
    """Return ``output + bias + residual`` [T, hidden], in ``output`` or ``summed``, and its ``rms_norm``.

    Without ``output`` the sum is ``residual``. Rounds like eager torch, after each sum and the norm; ``packing`` asks
    for codes of the norm.
    """
    rows, columns = residual.shape
    written, sink = sink_for(residual, rows, columns, packing)
    block = max(triton.next_power_of_2(sink["out_columns"]), 128)
    add_norm_kernel[(rows,)](
        residual, output, output if summed is None else summed, bias, weight, columns, residual.stride(0),
        0 if output is None else output.stride(0), epsilon,
        **sink, BLOCK=block, num_warps=_warps(rows, block, packing), **dependent(),
    )  # fmt: skip
    return residual if output is None else output, written


def gate_up(
    inner: torch.Tensor, packing: Packing | None, shares: torch.Tensor | None = None
) -> torch.Tensor | PackedActivations:
    """Map ``inner`` [T, 2 F], gates first, to [T, F] times ``shares`` [T] fp32; rounded after silu and each product."""
    rows, columns = inner.shape[0], inner.shape[1] // 2
    written, sink = sink_for(inner, rows, columns, packing)
    if packing is None or packing.in_segments:
        block, rest = min(max(triton.next_power_of_2(sink["out_columns"]), 128), _PIECE), 0
    else:
        block, rest = two_powers(sink["out_columns"])
    gate_kernel[(rows, triton.cdiv(sink["out_columns"], block + rest))](
        inner, shares, columns, inner.stride(0), **sink, BLOCK=block, REST=rest,
        num_warps=_warps(rows, block, packing), **dependent(),
    )  # fmt: skip
    return written


def two_powers(columns: int) -> tuple[int, int]:
    """Return two powers of two (or one and 0) that hold ``columns``: 18,944 in 16,384 + 4,096 instead of 32,768."""
    most = max(triton.next_power_of_2(columns), 128)
    rest = triton.next_power_of_2(max(columns - most // 2, 128))
    return (most // 2, rest) if most > 1024 and rest < most // 2 else (most, 0)


def _warps(rows: int, block: int, packing: Packing | None) -> int:
    """Return the warps per program; more for few rows with a row-wise maximum (H200, 32 rows: 4.7 to 3.5 us)."""
    if packing is not None and not packing.in_segments and rows <= FEW_ROWS:
        return min(max(block // 256, 1), 32)
    return min(max(block // 512, 1), 16)


def sink_for(
    like: torch.Tensor, rows: int, columns: int, packing: Packing | None
) -> tuple[torch.Tensor | PackedActivations, dict[str, Any]]:
    """Allocate [rows, columns] like ``like``, or codes; also return the arguments of `write_row`."""
    if packing is None:
        out = like.new_empty(rows, columns)
        return out, {
            "out": out, "scales": None, "smoothing": None, "out_columns": columns, "scale_stride": 0,
            "SEGMENTS": False, "POWER_OF_TWO": False,
        }  # fmt: skip
    packed = packing.allocate(rows, like.dtype, like.device)
    return packed, {
        "out": packed.codes, "scales": packed.scales, "smoothing": packing.smoothing, "out_columns": packing.columns,
        "scale_stride": packed.scales.stride(1), "SEGMENTS": packing.in_segments, "POWER_OF_TWO": packing.power_of_two,
    }  # fmt: skip


# The scale stride is the number of tokens: not specialized, to avoid a compilation for each.
@triton.jit(do_not_specialize=["scale_stride"])
def add_norm_kernel(
    residual, output, summed, bias, weight, columns, residual_stride, output_stride, epsilon,
    out, scales, smoothing, out_columns, scale_stride,
    SEGMENTS: tl.constexpr, POWER_OF_TWO: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Add the residual and normalize; one program per row, the whole row in registers."""
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    dtype = residual.dtype.element_ty
    x = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    if output is not None:
        place = row * output_stride + column
        added = tl.load(output + place, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            added += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
            added = added.to(dtype).to(tl.float32)
        x = (added + x).to(dtype)
        tl.store(summed + place, x, mask=inside)
        x = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / columns + epsilon)
    normed = x * inverse * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    normed = normed.to(dtype).to(tl.float32)
    write_row(normed, row, column, inside, out, scales, smoothing, out_columns, scale_stride, SEGMENTS, POWER_OF_TWO)


@triton.jit(do_not_specialize=["scale_stride"])
def gate_kernel(
    inner, shares, columns, inner_stride,
    out, scales, smoothing, out_columns, scale_stride,
    SEGMENTS: tl.constexpr, POWER_OF_TWO: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Multiply gate and up projection; one program per row of BLOCK + REST columns, or per piece of a row."""
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    product = _gated(inner, shares, row, column, columns, inner_stride)
    if REST == 0:
        write_row(
            product, row, column, column < columns, out, scales, smoothing, out_columns, scale_stride,
            SEGMENTS, POWER_OF_TWO,
        )  # fmt: skip
    else:
        beyond = BLOCK + tl.arange(0, REST)
        others = _smoothed(
            _gated(inner, shares, row, beyond, columns, inner_stride), smoothing, beyond, beyond < columns
        )
        product = _smoothed(product, smoothing, column, column < columns)
        bits = tl.maximum(tl.max(magnitude_bits(product), 0), tl.max(magnitude_bits(others), 0))
        scale = scale_of(bits, out.dtype.element_ty, False)
        tl.store(scales + row, scale)
        place = out + row * out_columns
        tl.store(place + column, codes_of(product, scale, out.dtype.element_ty))
        tl.store(place + beyond, codes_of(others, scale, out.dtype.element_ty), mask=beyond < out_columns)


@triton.jit
def _gated(inner, shares, row, column, columns, inner_stride):
    """Compute the products of a row, in fp32 but rounded to the dtype."""
    inside = column < columns
    dtype = inner.dtype.element_ty
    place = inner + row * inner_stride + column
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + columns, mask=inside, other=0.0).to(tl.float32)
    opened = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    product = (opened * up).to(dtype).to(tl.float32)
    if shares is not None:
        product = (product * tl.load(shares + row)).to(dtype).to(tl.float32)
    return product


@triton.jit
def _smoothed(numbers, smoothing, column, inside):
    if smoothing is not None:
        numbers = tl.div_rn(numbers, tl.load(smoothing + column, mask=inside, other=1.0))
    return numbers


@triton.jit
def write_row(
    numbers, row, column, inside, out, scales, smoothing, out_columns, scale_stride,
    SEGMENTS: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """Write ``numbers`` [BLOCK] fp32 of ``row`` at ``column``, 0 where not ``inside``: a row, or whole segments of it.

    ``out`` [T, out_columns] is contiguous, scales are column-major.
    """
    place = out + row * out_columns + column
    if scales is None:
        codes = numbers.to(out.dtype.element_ty)
    elif SEGMENTS:
        BLOCK: tl.constexpr = numbers.shape[0]
        cut = tl.reshape(numbers, (BLOCK // _TILE, _TILE))
        scale = scale_of(tl.max(magnitude_bits(cut), 1), out.dtype.element_ty, POWER_OF_TWO)
        codes = tl.reshape(codes_of(cut, scale[:, None], out.dtype.element_ty), (BLOCK,))
        segment = tl.min(column, 0) // _TILE + tl.arange(0, BLOCK // _TILE)
        tl.store(scales + row + segment * scale_stride, scale, mask=segment * _TILE < out_columns)
    else:
        numbers = _smoothed(numbers, smoothing, column, inside)
        scale = scale_of(tl.max(magnitude_bits(numbers), 0), out.dtype.element_ty, False)
        codes = codes_of(numbers, scale, out.dtype.element_ty)
        tl.store(scales + row, scale)
    tl.store(place, codes, mask=column < out_columns)


def rotate_store(
    mixed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, query_norm: torch.nn.Module | None,
    key_norm: torch.nn.Module | None, keys: torch.Tensor, values: torch.Tensor, cells: torch.Tensor,
    key_scales: torch.Tensor | None = None, value_scales: torch.Tensor | None = None, bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Map ``mixed`` [T, groups, share + 2, D] (queries, key and value of each group) to query [T, 1, groups x share,
    D].

    ``bias`` [groups x (share + 2) x D] is added first. ``cos`` and ``sin`` [T, ..., R] are from `RopeTable.at`; norms
    are RMSNorms of a head, or both None. Keys and values go to cell ``cells[t]`` of one layer's ``keys`` and ``values``
    [blocks, block size, groups, D], in the model's dtype, bf16, or E4M3 codes as uint8 with fp32 scales [groups].
    Rounds like eager torch.
    """
    tokens, groups, heads, width = mixed.shape
    query = mixed.new_empty(tokens, 1, groups * (heads - 2), width)
    norms = (None, None, 0.0) if query_norm is None else (query_norm.weight, key_norm.weight, query_norm.eps)
    heads_block, block = triton.next_power_of_2(heads), triton.next_power_of_2(width)
    rotate_store_kernel[(tokens, groups)](
        mixed, bias, cos, sin, *norms, query, keys, values, cells, key_scales, value_scales, *mixed.stride()[:3],
        groups, SHARE=heads - 2, WIDTH=width, HALF=cos.shape[-1] // 2, HEADS=heads_block, BLOCK=block,
        num_warps=min(max(heads_block * block // 512, 1), 8), **dependent(),
    )  # fmt: skip
    return query


# A step's cells and a layer's scales are aligned to 8 or 4 bytes: not specialized, to avoid a compilation for each.
@triton.jit(do_not_specialize_on_alignment=["cells", "key_scales", "value_scales"])
def rotate_store_kernel(
    mixed, bias, cos, sin, query_norm, key_norm, epsilon, query, keys, values, cells, key_scales, value_scales,
    token_stride, group_stride, head_stride, groups,
    SHARE: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Rotate and store; one program per token and group. The first 2 HALF dimensions of a head are rotated."""
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside, turns = column < WIDTH, column < 2 * HALF
    partner = tl.where(column < HALF, column + HALF, column - HALF)
    is_real = head < SHARE + 2
    source = mixed + token * token_stride + group * group_stride + head * head_stride
    first = (group * (SHARE + 2) + head) * WIDTH
    numbers = _with_bias(source + column, bias, first + column, is_real & inside, mixed)
    others = _with_bias(source + partner, bias, first + partner, is_real & turns, mixed)
    if query_norm is not None:
        inverse = tl.rsqrt(tl.sum(numbers * numbers, 1) / WIDTH + epsilon)[:, None]
        numbers = _normed(numbers, inverse, query_norm, key_norm, column, inside, mixed, head, SHARE)
        others = _normed(others, inverse, query_norm, key_norm, partner, turns, mixed, head, SHARE)
    angle = token * 2 * HALF + column
    rotated_numbers = rotated(numbers, others, cos + angle, sin + angle, turns, mixed)
    numbers = tl.where((head <= SHARE) & turns, rotated_numbers, numbers).to(mixed.dtype.element_ty)
    place = ((token * groups + group) * SHARE + head) * WIDTH + column
    tl.store(query + place, numbers, mask=(head < SHARE) & inside)
    cell = (tl.load(cells + token) * groups + group) * WIDTH + column + head * 0
    tl.store(keys + cell, _stored(numbers, keys, key_scales, group), mask=(head == SHARE) & inside)
    tl.store(values + cell, _stored(numbers, values, value_scales, group), mask=(head == SHARE + 1) & inside)


@triton.jit
def _with_bias(place, bias, number, inside, mixed):
    numbers = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        numbers += tl.load(bias + number, mask=inside, other=0.0).to(tl.float32)
        numbers = numbers.to(mixed.dtype.element_ty).to(tl.float32)
    return numbers


@triton.jit
def _normed(numbers, inverse, query_norm, key_norm, column, inside, mixed, head, SHARE: tl.constexpr):
    of_query = tl.load(query_norm + column, mask=inside, other=0.0).to(tl.float32)
    of_key = tl.load(key_norm + column, mask=inside, other=0.0).to(tl.float32)
    normed = tl.where(head > SHARE, numbers, numbers * inverse * tl.where(head < SHARE, of_query, of_key))
    return normed.to(mixed.dtype.element_ty).to(tl.float32)


@triton.jit
def rotated(numbers, others, cos, sin, inside, mixed):
    """Rotate ``numbers`` with their partners ``others``; one product is rounded to the dtype, as in eager torch."""
    along = numbers * tl.load(cos, mask=inside, other=0.0).to(tl.float32)
    across = others * tl.load(sin, mask=inside, other=0.0).to(tl.float32)
    return along.to(mixed.dtype.element_ty).to(tl.float32) + across


@triton.jit
def _stored(numbers, cache, scales, group):
    """Convert like `KVFormat.pack`."""
    if scales is None:
        stored = numbers.to(cache.dtype.element_ty)
    else:
        scaled = tl.div_rn(numbers.to(tl.float32), tl.load(scales + group))
        codes = e4m3_of(tl.minimum(tl.maximum(scaled, -_LARGEST), _LARGEST)).to(tl.uint8, bitcast=True)
        stored = tl.where(scaled == scaled, codes, 0x7F)  # a NaN stays one
    return stored


def gate_up_gradient(inner: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``inner`` [T, 2 F] from that of `gate_up`, [T, F]; rounds like eager torch."""
    inner, grad = inner.contiguous(), grad.contiguous()
    rows, columns = grad.shape
    out = torch.empty_like(inner)
    gate_gradient_kernel[(rows, triton.cdiv(columns, _PIECE))](inner, grad, out, columns, BLOCK=_PIECE, num_warps=4)
    return out


@triton.jit
def gate_gradient_kernel(inner, grad, out, columns, BLOCK: tl.constexpr):
    """Compute the gradients of gate and up projection; one program per piece of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    dtype = inner.dtype.element_ty
    place = row * 2 * columns + column
    gate = tl.load(inner + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(inner + place + columns, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(grad + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    opened = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)  # the bits of `gate_kernel`
    of_opened = (slope * up).to(dtype).to(tl.float32)
    tl.store(out + place, (of_opened * share * (1.0 + gate * (1.0 - share))).to(dtype), mask=inside)
    tl.store(out + place + columns, (slope * opened).to(dtype), mask=inside)
