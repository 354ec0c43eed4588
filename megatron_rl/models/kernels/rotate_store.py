"""A decode step's heads: norms of query and key, rotation, key and value into the cache's blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_rl.quantization.formats import FP8_MAX
from megatron_rl.quantization.kernels.quantize import e4m3_of

_LARGEST = tl.constexpr(FP8_MAX)


def rotate_store(
    mixed: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    query_norm: torch.nn.Module | None,
    key_norm: torch.nn.Module | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    cells: torch.Tensor,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """``mixed`` [T, groups, share + 2, D], a group's queries, key and value -> query [T, 1, groups x share, D].

    ``cos`` and ``sin`` [T, ..., R] as `RopeTable.at` gives them; the norms are RMSNorms of a head, or both None. One
    layer's ``keys`` and ``values`` [blocks, block size, groups, D] of the model's dtype, bf16, or E4M3 codes in uint8
    with fp32 scales [groups]; token t goes to cell ``cells[t]`` of them, [T] int64. Rounded where eager torch rounds.
    """
    tokens, groups, heads, width = mixed.shape
    half, rest = cos.shape[-1] // 2, width - cos.shape[-1]
    query = mixed.new_empty(tokens, 1, groups * (heads - 2), width)
    norms = (None, None, 0.0) if query_norm is None else (query_norm.weight, key_norm.weight, query_norm.eps)
    block = triton.next_power_of_2(heads) * triton.next_power_of_2(width)
    rotate_store_kernel[(tokens, groups)](
        mixed, cos, sin, *norms, query, keys, values, cells, key_scales, value_scales, *mixed.stride()[:3], groups,
        SHARE=heads - 2, WIDTH=width, HALF=half, HEADS=triton.next_power_of_2(heads),
        HALF_BLOCK=triton.next_power_of_2(half), REST_BLOCK=triton.next_power_of_2(max(rest, 1)),
        num_warps=min(max(block // 512, 1), 8),
    )  # fmt: skip
    return query


# A step's cells and a layer's scales come at 8 or 4 bytes: no compilation for each alignment.
@triton.jit(do_not_specialize_on_alignment=["cells", "key_scales", "value_scales"])
def rotate_store_kernel(
    mixed, cos, sin, query_norm, key_norm, epsilon, query, keys, values, cells, key_scales, value_scales,
    token_stride, group_stride, head_stride, groups,
    SHARE: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a token and group. Heads come in two rotated halves and a rest that is not rotated."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    head = tl.arange(0, HEADS)[:, None]
    near = tl.arange(0, HALF_BLOCK)[None, :]
    in_half = near < HALF
    far = near + HALF
    beyond = tl.arange(0, REST_BLOCK)[None, :] + 2 * HALF
    in_rest = beyond < WIDTH
    is_real = head < SHARE + 2
    dtype = mixed.dtype.element_ty
    source = mixed + token * token_stride + group * group_stride + head * head_stride
    left = tl.load(source + near, mask=is_real & in_half, other=0.0).to(tl.float32)
    right = tl.load(source + far, mask=is_real & in_half, other=0.0).to(tl.float32)
    rest = tl.load(source + beyond, mask=is_real & in_rest, other=0.0).to(tl.float32)
    if query_norm is not None:
        squares = tl.sum(left * left, 1) + tl.sum(right * right, 1) + tl.sum(rest * rest, 1)
        inverse = tl.rsqrt(squares / WIDTH + epsilon)[:, None]
        left = _normed(left, inverse, query_norm, key_norm, near, in_half, mixed, head, SHARE)
        right = _normed(right, inverse, query_norm, key_norm, far, in_half, mixed, head, SHARE)
        rest = _normed(rest, inverse, query_norm, key_norm, beyond, in_rest, mixed, head, SHARE)
    angles = token * 2 * HALF
    turned_left = _turned(left, right, cos + angles + near, sin + angles + near, in_half, mixed)
    turned_right = _turned(right, left, cos + angles + far, sin + angles + far, in_half, mixed)
    is_turned = head <= SHARE
    left = tl.where(is_turned, turned_left, left).to(dtype)
    right = tl.where(is_turned, turned_right, right).to(dtype)
    rest = rest.to(dtype)
    place = ((token * groups + group) * SHARE + head) * WIDTH
    _write(left, right, rest, query, place, None, group, head < SHARE, near, far, beyond, in_half, in_rest)
    cell = (tl.load(cells + token) * groups + group) * WIDTH + head * 0
    is_key, is_value = head == SHARE, head == SHARE + 1
    _write(left, right, rest, keys, cell, key_scales, group, is_key, near, far, beyond, in_half, in_rest)
    _write(left, right, rest, values, cell, value_scales, group, is_value, near, far, beyond, in_half, in_rest)


@triton.jit
def _normed(numbers, inverse, query_norm, key_norm, column, inside, mixed, head, SHARE: tl.constexpr):
    of_query = tl.load(query_norm + column, mask=inside, other=0.0).to(tl.float32)
    of_key = tl.load(key_norm + column, mask=inside, other=0.0).to(tl.float32)
    normed = tl.where(head > SHARE, numbers, numbers * inverse * tl.where(head < SHARE, of_query, of_key))
    return normed.to(mixed.dtype.element_ty).to(tl.float32)


@triton.jit
def _turned(numbers, others, cos, sin, inside, mixed):
    along = numbers * tl.load(cos, mask=inside, other=0.0).to(tl.float32)
    across = others * tl.load(sin, mask=inside, other=0.0).to(tl.float32)
    return along.to(mixed.dtype.element_ty).to(tl.float32) + across


@triton.jit
def _write(left, right, rest, to, place, scales, group, chosen, near, far, beyond, in_half, in_rest):
    """The heads that are ``chosen``, in the numbers of ``to``."""
    tl.store(to + place + near, _stored(left, to, scales, group), mask=chosen & in_half)
    tl.store(to + place + far, _stored(right, to, scales, group), mask=chosen & in_half)
    tl.store(to + place + beyond, _stored(rest, to, scales, group), mask=chosen & in_rest)


@triton.jit
def _stored(numbers, cache, scales, group):
    """As `KVNumbers.pack`."""
    if scales is None:
        stored = numbers.to(cache.dtype.element_ty)
    else:
        scaled = tl.div_rn(numbers.to(tl.float32), tl.load(scales + group))
        codes = e4m3_of(tl.minimum(tl.maximum(scaled, -_LARGEST), _LARGEST)).to(tl.uint8, bitcast=True)
        stored = tl.where(scaled == scaled, codes, 0x7F)  # a NaN stays one
    return stored
