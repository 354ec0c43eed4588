"""One new token a row against its pages, in two steps: a softmax for each split of the keys, then their sum.

How the keys are cut depends on the longest sequence that the cache can hold and on nothing else: a row's result does
not depend on its neighbours, and one captured graph serves all lengths. Splits beyond a row's end return at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_rl.attention.kernels.tiles import (
    LOG2_E,
    SMALLEST_TILE,
    add_block,
    as_floats,
    block_of,
    padded_width,
    read_block,
)

MOST_SPLITS = 16
SHORTEST_SPLIT = 256
"""Keys; below it, adding up the parts costs more than it saves."""
_BLOCK = 64


def split_length(longest: int) -> int:
    """Keys a split, a multiple of every block, for sequences of up to ``longest`` tokens."""
    return max(SHORTEST_SPLIT, -(-longest // (MOST_SPLITS * _BLOCK)) * _BLOCK)


def decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """``query`` [N, 1, heads, D] at ``positions`` [N] int64 -> [N, 1, heads * D].

    ``keys`` and ``values`` [pages, page_length, groups, D], contiguous: numbers, or with fp32 scales [groups] E4M3
    codes as uint8. ``table`` [at least N, pages of the longest sequence] int32. The host reads nothing.
    """
    rows, _, heads, width = query.shape
    _, page_length, groups, _ = keys.shape
    share = heads // groups
    split = split_length(table.shape[1] * page_length)
    splits = -(-table.shape[1] * page_length // split)
    query = query.contiguous()
    out = torch.empty(rows, 1, heads * width, dtype=query.dtype, device=query.device)
    parts = torch.empty(rows, heads, splits, width, dtype=torch.float32, device=query.device)
    # Of each part, the largest score and the sum of the weights.
    figures = torch.empty(2, rows, heads, splits, dtype=torch.float32, device=query.device)
    block_d = padded_width(width)
    splits_kernel[(rows, groups, splits)](
        query, as_floats(keys, key_scales), as_floats(values, value_scales), table, positions,
        key_scales, value_scales, parts, figures[0], figures[1], width**-0.5 * LOG2_E, table.stride(0),
        SHARE=share, GROUPS=groups, WIDTH=width, PAGE=page_length, SPLIT=split, SPLITS=splits,
        BLOCK_Q=max(SMALLEST_TILE, triton.next_power_of_2(share)), BLOCK_K=block_of(page_length), BLOCK_D=block_d,
        PRECISION="ieee", num_warps=4, num_stages=3,
    )  # fmt: skip
    sum_kernel[(rows, heads)](
        parts, figures[0], figures[1], positions, out,
        WIDTH=width, SPLIT=split, SPLITS=splits, BLOCK_S=triton.next_power_of_2(splits), BLOCK_D=block_d, num_warps=2,
    )  # fmt: skip
    return out


@triton.jit
def splits_kernel(
    query, keys, values, table, positions, key_scales, value_scales, parts, maxima, sums, scale, table_stride,
    SHARE: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A program is (row, group, split); the query heads of a group are the rows of its tile."""
    row, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(positions + row).to(tl.int32) + 1
    begin = split * SPLIT
    end = tl.minimum(begin + SPLIT, length)
    if begin < length:
        member, column = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
        head = row.to(tl.int64) * GROUPS * SHARE + group * SHARE + member
        real = (member < SHARE)[:, None] & (column < WIDTH)[None, :]
        q = tl.load(query + head[:, None] * WIDTH + column[None, :], mask=real, other=0.0)
        if key_scales is not None:
            scale *= tl.load(key_scales + group)
        largest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_Q], tl.float32)
        mixed = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
        for start in range(begin, end, BLOCK_K):
            page = tl.load(table + row * table_stride + start // PAGE)
            key = read_block(keys, page, start % PAGE, group, GROUPS, WIDTH, PAGE, BLOCK_K, BLOCK_D, q.dtype)
            value = read_block(values, page, start % PAGE, group, GROUPS, WIDTH, PAGE, BLOCK_K, BLOCK_D, q.dtype)
            inside = start + tl.arange(0, BLOCK_K) < length
            value = tl.where(inside[:, None], value, 0.0).to(q.dtype)  # what another sequence left there may be NaN
            largest, total, mixed = add_block(
                q, key, value, inside[None, :], scale, largest, total, mixed, PRECISION
            )
        if value_scales is not None:
            mixed *= tl.load(value_scales + group)
        place = head * SPLITS + split
        tl.store(parts + place[:, None] * WIDTH + column[None, :], mixed, mask=real)
        tl.store(maxima + place, largest, mask=member < SHARE)
        tl.store(sums + place, total, mask=member < SHARE)


@triton.jit
def sum_kernel(
    parts, maxima, sums, positions, out,
    WIDTH: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A program is (row, head)."""
    row = tl.program_id(0)
    head = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    length = tl.load(positions + row).to(tl.int32) + 1
    split, column = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    used = split * SPLIT < length
    largest = tl.load(maxima + head * SPLITS + split, mask=used, other=float("-inf"))
    shrink = tl.exp2(largest - tl.max(largest, 0))
    total = tl.sum(tl.load(sums + head * SPLITS + split, mask=used, other=0.0) * shrink, 0)
    real = used[:, None] & (column < WIDTH)[None, :]
    part = tl.load(parts + (head * SPLITS + split)[:, None] * WIDTH + column[None, :], mask=real, other=0.0)
    mixed = tl.sum(part * shrink[:, None], 0) / total
    tl.store(out + head * WIDTH + column, mixed.to(out.dtype.element_ty), mask=column < WIDTH)
