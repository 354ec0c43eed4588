"""Several new tokens of several sequences against their pages; their own keys and values are there already."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_rl.attention.kernels.tiles import LOG2_E, add_block, as_floats, block_of, padded_width, read_block

TILE = 64
"""New tokens a program."""


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
    query = query.contiguous()
    out = torch.empty(tokens, 1, heads * width, dtype=query.dtype, device=query.device)
    extend_kernel[(cu_seqlens.shape[0] - 1, heads, triton.cdiv(longest, TILE))](
        query, as_floats(keys, key_scales), as_floats(values, value_scales), table, cu_seqlens, first_positions,
        key_scales, value_scales, out, width**-0.5 * LOG2_E, table.stride(0),
        HEADS=heads, SHARE=heads // groups, GROUPS=groups, WIDTH=width, PAGE=page_length,
        BLOCK_Q=TILE, BLOCK_K=block_of(page_length), BLOCK_D=padded_width(width),
        PRECISION="ieee", num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["table_stride"])
def extend_kernel(
    query, keys, values, table, cu_seqlens, first_positions, key_scales, value_scales, out, scale, table_stride,
    HEADS: tl.constexpr, SHARE: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program is (sequence, query head, tile of new tokens)."""
    sequence, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start_token = tl.load(cu_seqlens + sequence)
    count = tl.load(cu_seqlens + sequence + 1) - start_token
    if tile * BLOCK_Q < count:
        first = tl.load(first_positions + sequence).to(tl.int32)
        group = head // SHARE
        member, column = tile * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
        real = (member < count)[:, None] & (column < WIDTH)[None, :]
        place = ((start_token + member).to(tl.int64) * HEADS + head)[:, None] * WIDTH + column[None, :]
        q = tl.load(query + place, mask=real, other=0.0)
        if key_scales is not None:
            scale *= tl.load(key_scales + group)
        largest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_Q], tl.float32)
        mixed = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
        reach = first + tl.minimum(count, (tile + 1) * BLOCK_Q)
        for start in range(0, reach, BLOCK_K):
            page = tl.load(table + sequence * table_stride + start // PAGE)
            key = read_block(keys, page, start % PAGE, group, GROUPS, WIDTH, PAGE, BLOCK_K, BLOCK_D, q.dtype)
            value = read_block(values, page, start % PAGE, group, GROUPS, WIDTH, PAGE, BLOCK_K, BLOCK_D, q.dtype)
            position = start + tl.arange(0, BLOCK_K)
            value = tl.where((position < reach)[:, None], value, 0.0).to(q.dtype)
            visible = position[None, :] <= (first + member)[:, None]
            largest, total, mixed = add_block(q, key, value, visible, scale, largest, total, mixed, PRECISION)
        if value_scales is not None:
            mixed *= tl.load(value_scales + group)
        tl.store(out + place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=real)
