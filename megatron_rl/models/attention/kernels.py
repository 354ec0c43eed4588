"""Triton kernels of a decode step, on CUDA or in Triton's interpreter; the torch twin is ``backends/paged.py``.

`decode`: one new token per row against its pages, in one kernel: a softmax for each split of the keys, then the program
that finishes a row's last split combines its splits in ascending order.

    keys 600, 1, 300     splits of 256 keys     items   row 0: 0 1 2   row 1: 0   row 2: 0 1
                                                programs take items in turn until none is left

The split length depends only on the GPU and the longest sequence of the cache, so a row's result does not depend on
other rows. `find_splits` lists the non-empty splits on the device, once per step, so one captured graph serves all
lengths, and no program starts for an empty split.

Here a page is a block of the cache, and a block the keys that a program reads at once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from megatron_rl.models.attention import tiles
from megatron_rl.models.attention.tiles import add_block, empty_softmax, fold, read_block

MOST_SPLITS = 64
SHORTEST_SPLIT = 128
"""Keys; for shorter splits, combining them costs more than they save."""
_USUAL_SPLIT = 256
_ROWS_TO_FILL = 32
"""Longest rows whose splits of usual length should fill a GPU; if they do not, the shortest splits are used."""
_BLOCK = 64
_SUMMED = 8
"""Parts read at once when they are combined."""
_ROWS = 256
"""Rows per iteration of `find_kernel`; fixed, because a size that depends on the batch needs a kernel for each."""
PROGRAMS_PER_PROCESSOR = 3
"""As many as are resident at once (test_triton_paged_compile.py): later ones would find no work."""
INVARIANT_PROGRAMS = 2
"""The same for tiles of 64 rows."""


@dataclass(frozen=True)
class Splits:
    """The work of one decode step, the same for all layers."""

    positions: torch.Tensor
    """[N] int64: row n attends to ``positions[n] + 1`` keys."""
    items: torch.Tensor
    """int32, ``row * splits + split`` each; the first ``count`` are valid."""
    count: torch.Tensor
    """[1] int32."""
    length: int
    """Keys per split."""
    most: int
    """Splits of the longest sequence."""
    counters: torch.Tensor
    """[N, key heads] int32: finished splits; a multiple of the row's splits between two layers."""
    window: int | None = None
    """Sliding window."""
    invariant: bool = False
    """A row gets the same bits as a token in `extend.extend`."""


def find_splits(
    positions: torch.Tensor, longest: int, groups: int, window: int | None = None, invariant: bool = False
) -> Splits:
    """Find the splits of rows at ``positions`` [N] int64, up to ``longest``, for ``groups`` key heads; one kernel."""
    rows, device = positions.shape[0], positions.device
    length = tiles.INVARIANT_SPLIT if invariant else split_length(longest, groups, _processors(device))
    most = -(-longest // length)
    items = torch.empty(rows * most, dtype=torch.int32, device=device)
    counters = torch.empty(rows, groups, dtype=torch.int32, device=device)
    count = torch.empty(1, dtype=torch.int32, device=device)
    find_kernel[(1,)](
        positions, items, count, counters, rows, rows * groups,
        SPLIT=length, SPLITS=most, BLOCK=_ROWS, WINDOW=window,
    )  # fmt: skip
    return Splits(positions, items, count, length, most, counters, window, invariant)


def split_length(longest: int, groups: int, processors: int) -> int:
    """Return the keys per split, a multiple of every block size; independent of the batch."""
    items = _ROWS_TO_FILL * groups * -(-longest // _USUAL_SPLIT)
    if items < processors * PROGRAMS_PER_PROCESSOR:
        return SHORTEST_SPLIT
    return max(_USUAL_SPLIT, -(-longest // (MOST_SPLITS * _BLOCK)) * _BLOCK)


def decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, splits: Splits,
    scales: Sequence[torch.Tensor] = (), sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Map ``query`` [N, 1, heads, D] to [N, 1, heads * D].

    ``keys`` and ``values`` [pages, page_length, groups, D], contiguous: numbers, or E4M3 codes as uint8 with fp32
    ``scales`` [groups] of each. ``table`` [at least N, pages of the longest sequence] int32; ``sinks`` [heads]. No host
    read. Needs N x heads x splits x D fp32 numbers: 235 MB for 256 rows of a 7B model at 16k tokens.
    """
    rows, _, heads, width = query.shape
    _, page_length, groups, _ = keys.shape
    share, most, (key_scales, value_scales) = heads // groups, splits.most, scales or (None, None)
    query = query.contiguous()
    out = torch.empty(rows, 1, heads * width, dtype=query.dtype, device=query.device)
    parts = torch.empty(rows, heads, most, width, dtype=torch.float32, device=query.device)
    # Of each part: the largest score, and the sum of the weights.
    figures = torch.empty(2, rows, heads, most, dtype=torch.float32, device=query.device)
    block_d = tiles.padded_width(width)
    pages_reached = -(-splits.length // page_length) + (splits.length % page_length > 0)  # by a split, at most
    # Invariant, the tile is that of `extend`, so that both use the same matrix instructions.
    tile, warps = (tiles.TILE, tiles.warps_for(block_d)) if splits.invariant else (tiles.SMALLEST_TILE, 4)
    programs = _processors(query.device) * (INVARIANT_PROGRAMS if splits.invariant else PROGRAMS_PER_PROCESSOR)
    splits_kernel[(min(rows * most, -(-programs // groups)), groups)](
        query, tiles.as_floats(keys, key_scales), tiles.as_floats(values, value_scales), table, splits.positions,
        splits.items, splits.count, splits.counters, key_scales, value_scales, sinks, parts, figures[0], figures[1],
        out, width**-0.5 * tiles.LOG2_E, tiles.LOG2_E, table.stride(0),
        SHARE=share, GROUPS=groups, WIDTH=width, PAGE=page_length, SPLIT=splits.length, SPLITS=most,
        PAGES=triton.next_power_of_2(pages_reached), BLOCK_Q=max(tile, triton.next_power_of_2(share)),
        BLOCK_H=triton.next_power_of_2(share), BLOCK_S=_SUMMED, BLOCK_K=tiles.block_of(page_length), BLOCK_D=block_d,
        WINDOW=splits.window, INVARIANT=splits.invariant,
        num_warps=warps, num_stages=tiles.STAGES, enable_fp_fusion=not splits.invariant,
    )  # fmt: skip
    return out


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


# Triton compiles a kernel for each alignment of each pointer. Some of these are aligned to 8 or 4 bytes only: rows of a
# table, a layer's scales, half a buffer. Without this, a second kernel would be compiled in the middle of a run.


@triton.jit(do_not_specialize=["rows", "cells"], do_not_specialize_on_alignment=["positions"])
def find_kernel(
    positions, items, count, counters, rows, cells,
    SPLIT: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """List the items of all rows in order, and reset the counters; one program, BLOCK rows at once."""
    for start in range(0, cells, BLOCK):
        cell = start + tl.arange(0, BLOCK)
        tl.store(counters + cell, tl.zeros([BLOCK], tl.int32), mask=cell < cells)
    found = 0
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        length = tl.load(positions + row, mask=row < rows, other=-1).to(tl.int32) + 1
        end, skipped = (length + SPLIT - 1) // SPLIT, tiles.first_key(length, WINDOW) // SPLIT
        number = end - skipped
        first = found + tl.cumsum(number, 0) - end
        for split in range(SPLITS):
            tl.store(items + first + split, row * SPLITS + split, mask=(split >= skipped) & (split < end))
        found += tl.sum(number, 0)
    tl.store(count, found)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["positions", "key_scales", "value_scales", "sinks", "maxima", "sums"],
)
def splits_kernel(
    query, keys, values, table, positions, items, count, counters, key_scales, value_scales, sinks, parts, maxima,
    sums, out, scale, log2_e, table_stride,
    SHARE: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr,
    SPLITS: tl.constexpr, PAGES: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, WINDOW: tl.constexpr, INVARIANT: tl.constexpr,
):  # fmt: skip
    """Compute the parts of items. The programs of a group share its items; its query heads are rows of a tile."""
    group = tl.program_id(1)
    member, column = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    real = (member < SHARE)[:, None] & (column < WIDTH)[None, :]
    if key_scales is not None:
        scale *= tl.load(key_scales + group)
    work = tl.load(count)
    one = tl.minimum(work, 1)
    # Computed here, not before the loop, where these addresses would occupy registers.
    for at in tl.range(tl.program_id(0), work, tl.num_programs(0), disable_licm=True):
        item = tl.load(items + at)
        row, split = item // SPLITS, item % SPLITS
        length = tl.load(positions + row).to(tl.int32) + 1
        begin, seen = split * SPLIT, tiles.first_key(length, WINDOW)
        first_head = (row.to(tl.int64) * GROUPS + group) * SHARE
        head = first_head + member
        q = tl.load(query + head[:, None] * WIDTH + column[None, :], mask=real, other=0.0)
        q, factor = tiles.prepare_query(q, scale, key_scales is not None)
        largest, total, mixed = empty_softmax(BLOCK_Q, BLOCK_D)
        # All pages of the split in registers: a load whose address is being loaded cannot overlap.
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
                # Opaque 1: makes the compiler convert codes to fp16 before it arranges them for the tensor cores, in
                # rows of 16 bytes. Otherwise it would first collect each column's codes byte by byte.
                value *= one.to(value.dtype)
            largest, total, mixed = add_block(q, key, value, inside[None, :], factor, largest, total, mixed, INVARIANT)
        if value_scales is not None:
            mixed *= tl.load(value_scales + group)
        place = head * SPLITS + split
        tl.store(parts + place[:, None] * WIDTH + column[None, :], mixed, mask=real)
        tl.store(maxima + place, largest, mask=member < SHARE)
        tl.store(sums + place, total, mask=member < SHARE)
        # One thread counts after all have stored; acq_rel makes the parts of all programs visible to the last one.
        tl.debug_barrier()
        skipped, end = seen // SPLIT, (length + SPLIT - 1) // SPLIT
        done = end - skipped
        if done > 1:
            done = tl.atomic_add(counters + row * GROUPS + group, 1, sem="acq_rel") + 1
        if done % (end - skipped) == 0:
            sum_parts(parts, maxima, sums, sinks, out, first_head, group, skipped, end, log2_e,
                      SHARE, WIDTH, SPLITS, BLOCK_H, BLOCK_S, BLOCK_D)  # fmt: skip


@triton.jit
def sum_parts(
    parts, maxima, sums, sinks, out, first_head, group, skipped, end, log2_e,
    SHARE: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Combine the parts ``skipped .. end - 1`` of a group's heads in order, reading BLOCK_S at once."""
    member, column = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    head = first_head + member
    largest, total, mixed = tiles.with_sinks(sinks, group * SHARE + member, member < SHARE, log2_e, BLOCK_H, BLOCK_D)
    for first in range(skipped, end, BLOCK_S):
        for nth in tl.static_range(BLOCK_S):
            there = (member < SHARE) & (first + nth < end)
            place = head * SPLITS + first + nth
            part_largest = tl.load(maxima + place, mask=there, other=float("-inf"))
            part_total = tl.load(sums + place, mask=there, other=0.0)
            inside = there[:, None] & (column < WIDTH)[None, :]
            part = tl.load(parts + place[:, None] * WIDTH + column[None, :], mask=inside, other=0.0)
            largest, total, mixed = fold(largest, total, mixed, part_largest, part_total, part)
    real = (member < SHARE)[:, None] & (column < WIDTH)[None, :]
    place = head[:, None] * WIDTH + column[None, :]
    tl.store(out + place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=real)
