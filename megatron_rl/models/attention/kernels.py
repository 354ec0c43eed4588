"""Triton kernels over the paged KV cache, on CUDA or in Triton's interpreter; their twin is ``backends/paged.py``.

`decode`: one new token a row against its pages, in two steps: a softmax for each split of the keys, then their sum.

    keys 600, 1, 300     splits of 256 keys     items   row 0: 0 1 2   row 1: 0   row 2: 0 1
                                                programs take items in turn until there are no more

How the keys are cut depends on the longest sequence that the cache can hold and on nothing else: a row's result does
not depend on its neighbours. `find_splits` lists on the device, once a step, the splits that have keys, so one captured
graph serves all lengths, and no program is started for a split that has none.

`extend`: several new tokens of several sequences against their pages; their own keys and values are there already.

A page is a block of the cache; a block, here, the keys that a program reads at once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from megatron_rl.models.attention.tiles import (
    SMALLEST_TILE,
    add_block,
    as_factor,
    as_floats,
    block_of,
    first_key,
    padded_width,
    read_block,
)

MOST_SPLITS = 64
SHORTEST_SPLIT = 256
"""Keys; below it, adding up the parts costs more than it saves."""
_BLOCK = 64
_SUMMED = 16
"""Parts that are added up at once."""
_ROWS = 256
"""Whose splits are found at once. A number that went with the batch would need a kernel for each size."""
PROGRAMS_PER_PROCESSOR = 3
"""As many as fit at once (test_triton_paged_compile.py): one that had to wait for others would find no work left."""
STAGES = 3
"""Blocks of keys and values: one is multiplied while the next two are on their way."""
TILE = 64
"""Rows a program: new tokens times the query heads of a group, which read the same keys."""
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Splits:
    """The work of one decode step, the same for all layers."""

    positions: torch.Tensor
    """[N] int64: row n attends to ``positions[n] + 1`` keys."""
    items: torch.Tensor
    """int32, ``row * splits + split`` each, of which the first ``count`` count."""
    count: torch.Tensor
    """[1] int32."""
    length: int
    """Keys a split."""
    most: int
    """Splits of the longest sequence."""
    window: int | None = None
    """Keys that a row attends to at most, its newest."""


def find_splits(positions: torch.Tensor, longest: int, window: int | None = None) -> Splits:
    """Find the splits of rows at ``positions`` [N] int64 in a cache of up to ``longest`` tokens; one kernel."""
    rows = positions.shape[0]
    length = max(SHORTEST_SPLIT, -(-longest // (MOST_SPLITS * _BLOCK)) * _BLOCK)  # a multiple of every block
    most = -(-longest // length)
    items = torch.empty(rows * most, dtype=torch.int32, device=positions.device)
    count = torch.empty(1, dtype=torch.int32, device=positions.device)
    find_kernel[(1,)](positions, items, count, rows, SPLIT=length, SPLITS=most, BLOCK=_ROWS, WINDOW=window)
    return Splits(positions, items, count, length, most, window)


def decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    splits: Splits,
    scales: Sequence[torch.Tensor] = (),
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Map ``query`` [N, 1, heads, D] to [N, 1, heads * D].

    ``keys`` and ``values`` [pages, page_length, groups, D], contiguous: numbers, or with fp32 ``scales`` [groups] of
    each E4M3 codes as uint8. ``table`` [at least N, pages of the longest sequence] int32; ``sinks`` [heads]. The host
    reads nothing. N x heads x splits x D fp32 numbers are held: 235 MB for 256 rows of a 7B at a limit of 16k.
    """
    rows, _, heads, width = query.shape
    _, page_length, groups, _ = keys.shape
    share, most, (key_scales, value_scales) = heads // groups, splits.most, scales or (None, None)
    query = query.contiguous()
    out = torch.empty(rows, 1, heads * width, dtype=query.dtype, device=query.device)
    parts = torch.empty(rows, heads, most, width, dtype=torch.float32, device=query.device)
    # Of each part, the largest score and the sum of the weights.
    figures = torch.empty(2, rows, heads, most, dtype=torch.float32, device=query.device)
    block_d = padded_width(width)
    pages_reached = -(-splits.length // page_length) + (splits.length % page_length > 0)  # by a split, at most
    splits_kernel[(min(rows * most, -(-_programs(query.device) // groups)), groups)](
        query, as_floats(keys, key_scales), as_floats(values, value_scales), table, splits.positions, splits.items,
        splits.count, key_scales, value_scales, parts, figures[0], figures[1], width**-0.5 * LOG2_E, table.stride(0),
        SHARE=share, GROUPS=groups, WIDTH=width, PAGE=page_length, SPLIT=splits.length, SPLITS=most,
        PAGES=triton.next_power_of_2(pages_reached),
        BLOCK_Q=max(SMALLEST_TILE, triton.next_power_of_2(share)), BLOCK_K=block_of(page_length), BLOCK_D=block_d,
        WINDOW=splits.window,
        num_warps=4, num_stages=STAGES,
    )  # fmt: skip
    sum_kernel[(rows, heads)](
        parts, figures[0], figures[1], splits.positions, sinks, out, LOG2_E,
        WIDTH=width, SPLIT=splits.length, SPLITS=most, BLOCK_S=_SUMMED, BLOCK_D=block_d, WINDOW=splits.window,
        num_warps=2,
    )  # fmt: skip
    return out


@functools.cache
def _programs(device: torch.device) -> int:
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return processors * PROGRAMS_PER_PROCESSOR


# Triton compiles a kernel for each alignment of each pointer. Of these some come at 8 or 4 bytes: a row of a table of
# positions, a layer's scales, the second half of a buffer. A second kernel would be compiled in the middle of a run.


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["positions"])
def find_kernel(
    positions, items, count, rows,
    SPLIT: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """List the items of the rows, one row after the other; one program, BLOCK rows at once."""
    found = 0
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        length = tl.load(positions + row, mask=row < rows, other=-1).to(tl.int32) + 1
        end, skipped = (length + SPLIT - 1) // SPLIT, first_key(length, WINDOW) // SPLIT
        number = end - skipped
        first = found + tl.cumsum(number, 0) - end
        for split in range(SPLITS):
            tl.store(items + first + split, row * SPLITS + split, mask=(split >= skipped) & (split < end))
        found += tl.sum(number, 0)
    tl.store(count, found)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["positions", "key_scales", "value_scales", "maxima", "sums"],
)
def splits_kernel(
    query, keys, values, table, positions, items, count, key_scales, value_scales, parts, maxima, sums,
    scale, table_stride,
    SHARE: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr,
    SPLITS: tl.constexpr, PAGES: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Every program of a group takes every so-manieth item; the query heads of a group are the rows of its tile."""
    group = tl.program_id(1)
    member, column = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    real = (member < SHARE)[:, None] & (column < WIDTH)[None, :]
    if key_scales is not None:
        scale *= tl.load(key_scales + group)
    work = tl.load(count)
    one = tl.minimum(work, 1)
    for at in range(tl.program_id(0), work, tl.num_programs(0)):
        item = tl.load(items + at)
        row, split = item // SPLITS, item % SPLITS
        length = tl.load(positions + row).to(tl.int32) + 1
        begin, seen = split * SPLIT, first_key(length, WINDOW)
        head = row.to(tl.int64) * GROUPS * SHARE + group * SHARE + member
        q = tl.load(query + head[:, None] * WIDTH + column[None, :], mask=real, other=0.0)
        q, factor = as_factor(q, scale, key_scales is not None)
        largest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_Q], tl.float32)
        mixed = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
        # All pages of the split in registers: a load that waits for the load of its address is not overlapped.
        nth = tl.arange(0, PAGES)
        first_page = begin // PAGE
        known = (first_page + nth) * PAGE < length
        pages = tl.load(table + row * table_stride + first_page + nth, mask=known, other=0)
        for start in range(tl.maximum(begin, seen // BLOCK_K * BLOCK_K), tl.minimum(begin + SPLIT, length), BLOCK_K):
            page = tl.sum(tl.where(nth == start // PAGE - first_page, pages, 0), 0)
            inside = start + tl.arange(0, BLOCK_K) < length
            if WINDOW is not None:
                inside &= start + tl.arange(0, BLOCK_K) >= seen
            key = read_block(keys, page, start % PAGE, group, inside, GROUPS, WIDTH, PAGE, BLOCK_K, BLOCK_D, q.dtype)
            value = read_block(
                values, page, start % PAGE, group, inside, GROUPS, WIDTH, PAGE, BLOCK_K, BLOCK_D, q.dtype
            )
            if value_scales is not None:
                # The compiler cannot know that this is 1, so it takes codes to fp16 before it lays them out for the
                # tensor cores, in rows of 16 bytes. Otherwise it would first collect each column's codes byte by byte.
                value *= one.to(value.dtype)
            largest, total, mixed = add_block(q, key, value, inside[None, :], factor, largest, total, mixed, False)
        if value_scales is not None:
            mixed *= tl.load(value_scales + group)
        place = head * SPLITS + split
        tl.store(parts + place[:, None] * WIDTH + column[None, :], mixed, mask=real)
        tl.store(maxima + place, largest, mask=member < SHARE)
        tl.store(sums + place, total, mask=member < SHARE)


@triton.jit(do_not_specialize_on_alignment=["positions", "maxima", "sums", "sinks"])
def sum_kernel(
    parts, maxima, sums, positions, sinks, out, log2_e,
    WIDTH: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Add up the parts of a row; one program per (row, head)."""
    row = tl.program_id(0)
    head = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    length = tl.load(positions + row).to(tl.int32) + 1
    column = tl.arange(0, BLOCK_D)
    largest, total = float("-inf"), 0.0
    if sinks is not None:
        largest, total = tl.load(sinks + tl.program_id(1)).to(tl.float32) * log2_e, 1.0
    mixed = tl.zeros([BLOCK_D], tl.float32)
    for first in range(first_key(length, WINDOW) // SPLIT, (length + SPLIT - 1) // SPLIT, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        used = split * SPLIT < length
        place = head * SPLITS + split
        scores = tl.load(maxima + place, mask=used, other=float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 0))
        weights, shrink = tl.exp2(scores - higher), tl.exp2(largest - higher)
        total = total * shrink + tl.sum(tl.load(sums + place, mask=used, other=0.0) * weights, 0)
        real = used[:, None] & (column < WIDTH)[None, :]
        part = tl.load(parts + place[:, None] * WIDTH + column[None, :], mask=real, other=0.0)
        mixed = mixed * shrink + tl.sum(part * weights[:, None], 0)
        largest = higher
    tl.store(out + head * WIDTH + column, (mixed / total).to(out.dtype.element_ty), mask=column < WIDTH)


def warps_for(block_d: int) -> int:
    """Return the warps of a program; heads wider than 128 would spill with four."""
    return 8 if block_d > 128 else 4


def extend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    first_positions: torch.Tensor,
    longest: int,
    scales: Sequence[torch.Tensor] = (),
    sinks: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Attend with ``query`` [T, 1, heads, D] of S sequences laid end to end -> [T, 1, heads * D].

    ``cu_seqlens`` [S + 1] int32 and ``first_positions`` [S] int64 of the new tokens, at most ``longest`` each;
    ``table`` [S, pages] int32; the rest as in `decode`.
    """
    tokens, _, heads, width = query.shape
    _, page_length, groups, _ = keys.shape
    share, block_d, (key_scales, value_scales) = heads // groups, padded_width(width), scales or (None, None)
    query = query.contiguous()
    out = torch.empty(tokens, 1, heads * width, dtype=query.dtype, device=query.device)
    extend_kernel[(cu_seqlens.shape[0] - 1, groups, triton.cdiv(longest * share, TILE))](
        query, as_floats(keys, key_scales), as_floats(values, value_scales), table, cu_seqlens, first_positions,
        key_scales, value_scales, sinks, out, width**-0.5 * LOG2_E, LOG2_E, table.stride(0),
        SHARE=share, GROUPS=groups, WIDTH=width, PAGE=page_length,
        BLOCK_Q=TILE, BLOCK_K=block_of(page_length), BLOCK_D=block_d, WINDOW=window,
        num_warps=warps_for(block_d), num_stages=STAGES,
    )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["first_positions", "key_scales", "value_scales", "sinks"],
)
def extend_kernel(
    query, keys, values, table, cu_seqlens, first_positions, key_scales, value_scales, sinks, out,
    scale, log2_e, table_stride,
    SHARE: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Attend; a program is (sequence, group, tile of new tokens, each with all query heads of the group)."""
    sequence, group, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start_token = tl.load(cu_seqlens + sequence)
    count = tl.load(cu_seqlens + sequence + 1) - start_token
    if tile * BLOCK_Q < count * SHARE:
        first = tl.load(first_positions + sequence).to(tl.int32)
        row, column = tile * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
        token, member = row // SHARE, row % SHARE
        real = (token < count)[:, None] & (column < WIDTH)[None, :]
        head = (start_token + token).to(tl.int64) * GROUPS * SHARE + group * SHARE + member
        place = head[:, None] * WIDTH + column[None, :]
        q = tl.load(query + place, mask=real, other=0.0)
        if key_scales is not None:
            scale *= tl.load(key_scales + group)
        q, factor = as_factor(q, scale, key_scales is not None)
        largest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_Q], tl.float32)
        if sinks is not None:
            largest, total = tl.load(sinks + group * SHARE + member).to(tl.float32) * log2_e, total + 1.0
        mixed = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
        key_length = first + tl.minimum(count, ((tile + 1) * BLOCK_Q + SHARE - 1) // SHARE)
        begin = first_key(first + tile * BLOCK_Q // SHARE + 1, WINDOW) // BLOCK_K * BLOCK_K
        page = tl.load(table + sequence * table_stride + begin // PAGE)
        for start in range(begin, key_length, BLOCK_K):
            position = start + tl.arange(0, BLOCK_K)
            inside = position < key_length
            key = read_block(keys, page, start % PAGE, group, inside, GROUPS, WIDTH, PAGE, BLOCK_K, BLOCK_D, q.dtype)
            value = read_block(
                values, page, start % PAGE, group, inside, GROUPS, WIDTH, PAGE, BLOCK_K, BLOCK_D, q.dtype
            )
            # A step ahead: a load that waits for the load of its address is not overlapped.
            page = tl.load(table + sequence * table_stride + tl.minimum(start + BLOCK_K, key_length - 1) // PAGE)
            visible = position[None, :] <= (first + token)[:, None]
            if WINDOW is not None:
                visible &= position[None, :] > (first + token - WINDOW)[:, None]
            largest, total, mixed = add_block(q, key, value, visible, factor, largest, total, mixed, WINDOW is not None)
        if value_scales is not None:
            mixed *= tl.load(value_scales + group)
        tl.store(out + place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=real)
