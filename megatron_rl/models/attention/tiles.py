"""Shared parts of the Triton attention kernels: loading blocks, a step of the running softmax, and combining parts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SMALLEST_TILE = 16
"""Minimum of `tl.dot`."""
_LARGEST_BLOCK = 64
STAGES = 3
"""Pipeline stages of key and value blocks: one is multiplied while two are loaded."""
TILE = 64
"""Rows of a program that uses wgmma: new tokens times the query heads of a group."""
INVARIANT_SPLIT = 256
"""Keys per split in `--batch-invariant-mode`, in every kernel and for every length."""
LOG2_E = 1.4426950408889634


def block_of(page_length: int) -> int:
    """Return the keys per block: the largest power of two that divides the page length, at most 64.

    Pages of one token (packed keys) are contiguous, so they use 64.

    Raises:
        ValueError: it is below 16.
    """
    block = min(page_length & -page_length, _LARGEST_BLOCK) if page_length > 1 else _LARGEST_BLOCK
    if block < SMALLEST_TILE:
        raise ValueError(f"pages of {page_length} tokens are not a multiple of {SMALLEST_TILE}")
    return block


def warps_for(block_d: int) -> int:
    """Return the warps of a program of `TILE` rows; heads wider than 128 would spill with four."""
    return 8 if block_d > 128 else 4


def padded_width(width: int) -> int:
    """Return a head's width, rounded up to a power of two."""
    return max(SMALLEST_TILE, triton.next_power_of_2(width))


def as_floats(codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """View uint8 codes as E4M3 if there are scales."""
    return codes if scales is None else codes.view(torch.float8_e4m3fn)


@triton.jit
def read_block(
    cache, page, first, group, inside, GROUPS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Load keys or values ``first .. first + BLOCK_K - 1`` of a page as ``[BLOCK_K, BLOCK_D]`` of ``dtype``.

    Zeros where ``inside`` [BLOCK_K] is false: stale memory may be NaN. The mask belongs to the load, because a
    ``tl.where`` after it would move the block through registers and shared memory again.
    """
    column = tl.arange(0, BLOCK_D)
    # One 64-bit address per block: offsets within it are compile-time constants.
    block = cache + ((page.to(tl.int64) * PAGE + first) * GROUPS + group) * WIDTH
    place = block + (tl.arange(0, BLOCK_K) * (GROUPS * WIDTH))[:, None] + column[None, :]
    if WIDTH == BLOCK_D:
        numbers = tl.load(place, mask=inside[:, None], other=0.0)
    else:
        numbers = tl.load(place, mask=inside[:, None] & (column < WIDTH)[None, :], other=0.0)
    return numbers.to(dtype)


@triton.jit
def prepare_query(query, scale, CODES: tl.constexpr):
    """Return ``query`` [Q, D] in the dtype of the product with keys, and the factor of the scores: a scalar or [Q, 1].

    For E4M3 keys bf16 queries become fp16 of at most 2, divided by powers of two: converting two codes to fp16 takes
    one instruction, to bf16 four.
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
    """Return the first of ``length`` keys that the newest token sees, in the type of ``length``."""
    return length * 0 if WINDOW is None else tl.maximum(length - WINDOW, 0)


@triton.jit
def add_block(query, key, value, visible, scale, largest, total, mixed, MAY_SEE_NONE: tl.constexpr):
    """Do one step of the running softmax, in fp32 and base 2.

    ``query`` [Q, D], ``key`` and ``value`` [K, D], ``visible`` [Q, K], ``scale`` a scalar or [Q, 1]. Unless
    ``MAY_SEE_NONE``, every query sees a key of its first block.
    """
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(largest, tl.max(scores, 1))
    reference = tl.where(higher == float("-inf"), 0.0, higher) if MAY_SEE_NONE else higher  # -inf less -inf is NaN
    weights = tl.exp2(scores - reference[:, None])
    shrink = tl.exp2(largest - reference)
    total = tl.fma(total, shrink, tl.sum(weights, 1))
    mixed = tl.dot(weights.to(value.dtype), value, mixed * shrink[:, None], input_precision="ieee")
    return higher, total, mixed


@triton.jit
def empty_softmax(ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return an empty running softmax: largest score, sum of weights, weighted values."""
    largest, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    return largest, total, tl.zeros([ROWS, BLOCK_D], tl.float32)


@triton.jit
def with_sinks(sinks, heads, real, log2_e, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return a running softmax of the sinks of ``heads`` [ROWS], or an empty one."""
    largest, total, mixed = empty_softmax(ROWS, BLOCK_D)
    if sinks is not None:
        largest, total = tl.load(sinks + heads, mask=real, other=0.0).to(tl.float32) * log2_e, total + 1.0
    return largest, total, mixed


@triton.jit
def fold(largest, total, mixed, part_largest, part_total, part_mixed):
    """Combine a part with a running softmax. Empty parts and an empty start change no bit.

    Multiply-adds are explicit, so that every kernel that combines the same parts gets the same bits.
    """
    higher = tl.maximum(largest, part_largest)
    reference = tl.where(higher == float("-inf"), 0.0, higher)  # -inf less -inf is NaN
    shrink, weight = tl.exp2(largest - reference), tl.exp2(part_largest - reference)
    total = tl.fma(total, shrink, part_total * weight)
    mixed = tl.fma(mixed, tl.broadcast_to(shrink[:, None], mixed.shape), part_mixed * weight[:, None])
    return higher, total, mixed
