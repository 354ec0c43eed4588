"""Several new tokens of several sequences against their pages; their own keys and values are there already."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_rl.attention.kernels.tiles import LOG2_E, add_block, as_floats, block_of, padded_width, read_block

TILE = 64
"""Rows a program: new tokens times the query heads of a group, which read the same keys."""
STAGES = 3
"""Blocks of keys and values: one is multiplied while the next two are on their way."""


def warps_for(block_d: int) -> int:
    """Of a program; heads wider than 128 would spill with four."""
    return 8 if block_d > 128 else 4


def extend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    first_positions: torch.Tensor,
    longest: int,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """``query`` [T, 1, heads, D] of S sequences laid end to end -> [T, 1, heads * D].

    ``cu_seqlens`` [S + 1] int32 and ``first_positions`` [S] int64 of the new tokens, at most ``longest`` each;
    ``table`` [S, pages] int32; the rest as in `paged_decode.decode`.
    """
    tokens, _, heads, width = query.shape
    _, page_length, groups, _ = keys.shape
    share, block_d = heads // groups, padded_width(width)
    query = query.contiguous()
    out = torch.empty(tokens, 1, heads * width, dtype=query.dtype, device=query.device)
    extend_kernel[(cu_seqlens.shape[0] - 1, groups, triton.cdiv(longest * share, TILE))](
        query, as_floats(keys, key_scales), as_floats(values, value_scales), table, cu_seqlens, first_positions,
        key_scales, value_scales, out, width**-0.5 * LOG2_E, table.stride(0),
        SHARE=share, GROUPS=groups, WIDTH=width, PAGE=page_length,
        BLOCK_Q=TILE, BLOCK_K=block_of(page_length), BLOCK_D=block_d,
        PRECISION="ieee", num_warps=warps_for(block_d), num_stages=STAGES,
    )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["first_positions", "key_scales", "value_scales"],
)
def extend_kernel(
    query, keys, values, table, cu_seqlens, first_positions, key_scales, value_scales, out, scale, table_stride,
    SHARE: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program is (sequence, group, tile); a tile's rows are new tokens, each with all query heads of the group."""
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
        largest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_Q], tl.float32)
        mixed = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
        reach = first + tl.minimum(count, ((tile + 1) * BLOCK_Q + SHARE - 1) // SHARE)
        page = tl.load(table + sequence * table_stride)
        for start in range(0, reach, BLOCK_K):
            position = start + tl.arange(0, BLOCK_K)
            inside = position < reach
            key = read_block(keys, page, start % PAGE, group, inside, GROUPS, WIDTH, PAGE, BLOCK_K, BLOCK_D, q.dtype)
            value = read_block(
                values, page, start % PAGE, group, inside, GROUPS, WIDTH, PAGE, BLOCK_K, BLOCK_D, q.dtype
            )
            # A step ahead: a load that waits for the load of its address is not overlapped.
            page = tl.load(table + sequence * table_stride + tl.minimum(start + BLOCK_K, reach - 1) // PAGE)
            visible = position[None, :] <= (first + token)[:, None]
            largest, total, mixed = add_block(q, key, value, visible, scale, largest, total, mixed, PRECISION)
        if value_scales is not None:
            mixed *= tl.load(value_scales + group)
        tl.store(out + place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=real)
