"""What the Triton kernels over the paged KV cache share: a block of keys or values, and one step of the softmax."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SMALLEST_TILE = 16
"""`tl.dot` takes no smaller one."""
_LARGEST_BLOCK = 64


def block_of(page_length: int) -> int:
    """Return keys a block: the largest power of two that divides a page, at most 64. ValueError below 16."""
    block = min(page_length & -page_length, _LARGEST_BLOCK)
    if block < SMALLEST_TILE:
        raise ValueError(f"pages of {page_length} tokens are not a multiple of {SMALLEST_TILE}")
    return block


def padded_width(width: int) -> int:
    """Return a head's width as a power of two."""
    return max(SMALLEST_TILE, triton.next_power_of_2(width))


def as_floats(codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Return codes as floats: they lie in uint8 tensors; with scales they are E4M3."""
    return codes if scales is None else codes.view(torch.float8_e4m3fn)


@triton.jit
def read_block(
    cache, page, first, group, inside, GROUPS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Keys or values ``first .. first + BLOCK_K - 1`` of a page as ``[BLOCK_K, BLOCK_D]`` of ``dtype``.

    Zeros where ``inside`` [BLOCK_K] is false: what another sequence left there may be NaN. The mask is the load's
    own, because a ``tl.where`` behind it would send the block through registers and shared memory once more.
    """
    column = tl.arange(0, BLOCK_D)
    # One 64-bit address a block: what is added to it is known when the kernel is compiled.
    block = cache + ((page.to(tl.int64) * PAGE + first) * GROUPS + group) * WIDTH
    place = block + (tl.arange(0, BLOCK_K) * (GROUPS * WIDTH))[:, None] + column[None, :]
    if WIDTH == BLOCK_D:
        numbers = tl.load(place, mask=inside[:, None], other=0.0)
    else:
        numbers = tl.load(place, mask=inside[:, None] & (column < WIDTH)[None, :], other=0.0)
    return numbers.to(dtype)


@triton.jit
def as_factor(query, scale, CODES: tl.constexpr):
    """Return ``query`` [Q, D] as it is multiplied with keys, and what the scores are multiplied with: one, or [Q, 1].

    With E4M3 keys bf16 becomes fp16 of at most 2, divided by powers of two: two codes become fp16 in one instruction,
    bf16 in four.
    """
    if CODES and query.dtype == tl.bfloat16:
        numbers = query.to(tl.float32)
        bits = tl.max(tl.abs(numbers), 1).to(tl.int32, bitcast=True) & 0x7F800000
        power = tl.where(bits == 0, 1.0, bits.to(tl.float32, bitcast=True))[:, None]
        return (numbers / power).to(tl.float16), scale * power
    else:
        return query, scale


@triton.jit
def first_key(length, WINDOW: tl.constexpr):
    """Return the first of ``length`` keys that the newest token sees; the type of ``length``."""
    return length * 0 if WINDOW is None else tl.maximum(length - WINDOW, 0)


@triton.jit
def add_block(query, key, value, visible, scale, largest, total, mixed, MAY_SEE_NONE: tl.constexpr):
    """Do one step of the running softmax, in fp32 and to the base 2.

    ``query`` [Q, D], ``key`` and ``value`` [K, D], ``visible`` [Q, K], ``scale`` one or [Q, 1]; every query sees a key
    of its first block, or it ``MAY_SEE_NONE``.
    """
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(largest, tl.max(scores, 1))
    reference = tl.where(higher == float("-inf"), 0.0, higher) if MAY_SEE_NONE else higher  # -inf less -inf is NaN
    weights = tl.exp2(scores - reference[:, None])
    shrink = tl.exp2(largest - reference)
    total = total * shrink + tl.sum(weights, 1)
    mixed = mixed * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return higher, total, mixed
