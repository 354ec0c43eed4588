"""The Triton kernel for new tokens of several sequences, over pages of the KV cache or over packed keys.

In invariant mode each split of 256 keys has its own softmax, and splits are combined in ascending order, as in
`kernels.decode`: a token gets the same bits in a decode step, an extension and a packed batch. For that, key blocks are
aligned to the start of the sequence, masked keys change no bit, and the compiler fuses no multiply-add.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from megatron_rl.models.attention import tiles
from megatron_rl.models.attention.tiles import add_block, empty_softmax, fold, read_block


def extend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, cu_seqlens: torch.Tensor,
    first_positions: torch.Tensor, longest: int, scales: Sequence[torch.Tensor] = (),
    sinks: torch.Tensor | None = None, window: int | None = None, invariant: bool = False,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attend with ``query`` [T, 1, heads, D] of S concatenated sequences -> [T, 1, heads * D].

    ``cu_seqlens`` [S + 1] int32 and ``first_positions`` [S] int64 of the new tokens, at most ``longest`` each;
    ``table`` [S, pages] int32; the rest as in `kernels.decode`. Packed keys are pages of one token, [K, 1, groups, D],
    with their offsets [S + 1] as ``table``. ``lse`` [heads, T] fp32 receives the log-sum-exps.
    """
    tokens, _, heads, width = query.shape
    _, page_length, groups, _ = keys.shape
    share, block_d, (key_scales, value_scales) = heads // groups, tiles.padded_width(width), scales or (None, None)
    query = query.contiguous()
    out = torch.empty(tokens, 1, heads * width, dtype=query.dtype, device=query.device)
    extend_kernel[(cu_seqlens.shape[0] - 1, groups, triton.cdiv(longest * share, tiles.TILE))](
        query, tiles.as_floats(keys, key_scales), tiles.as_floats(values, value_scales), table, cu_seqlens,
        first_positions, key_scales, value_scales, sinks, out, lse, width**-0.5 * tiles.LOG2_E, tiles.LOG2_E,
        table.stride(0), SHARE=share, GROUPS=groups, WIDTH=width, PAGE=page_length, BLOCK_Q=tiles.TILE,
        BLOCK_K=tiles.block_of(page_length), BLOCK_D=block_d, WINDOW=window,
        SPLIT=tiles.INVARIANT_SPLIT if invariant else None,
        num_warps=tiles.warps_for(block_d), num_stages=tiles.STAGES, enable_fp_fusion=not invariant,
    )  # fmt: skip
    return out


@triton.jit
def page_at(table, position, PAGE: tl.constexpr):
    """Return the page of a position of the sequence that ``table`` points to."""
    return tl.load(table) + position if PAGE == 1 else tl.load(table + position // PAGE)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["first_positions", "key_scales", "value_scales", "sinks"],
)
def extend_kernel(
    query, keys, values, table, cu_seqlens, first_positions, key_scales, value_scales, sinks, out, lse, scale,
    log2_e, table_stride,
    SHARE: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Attend; one program per (sequence, group, tile of new tokens times the query heads of the group)."""
    sequence, group, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start_token = tl.load(cu_seqlens + sequence)
    count = tl.load(cu_seqlens + sequence + 1) - start_token
    if tile * BLOCK_Q < count * SHARE:
        table += sequence * table_stride
        first = tl.load(first_positions + sequence).to(tl.int32)
        row, column = tile * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
        token, member = row // SHARE, group * SHARE + row % SHARE
        real = (token < count)[:, None] & (column < WIDTH)[None, :]
        head = (start_token + token).to(tl.int64) * GROUPS * SHARE + member
        place = head[:, None] * WIDTH + column[None, :]
        q = tl.load(query + place, mask=real, other=0.0)
        if key_scales is not None:
            scale *= tl.load(key_scales + group)
        q, factor = tiles.prepare_query(q, scale, key_scales is not None)
        largest, total, mixed = tiles.with_sinks(sinks, member, token < count, log2_e, BLOCK_Q, BLOCK_D)
        if SPLIT is not None:
            all_largest, all_total, all_mixed = largest, total, mixed
            largest, total, mixed = empty_softmax(BLOCK_Q, BLOCK_D)
        key_length = first + tl.minimum(count, ((tile + 1) * BLOCK_Q + SHARE - 1) // SHARE)
        begin = tiles.first_key(first + tile * BLOCK_Q // SHARE + 1, WINDOW) // BLOCK_K * BLOCK_K
        page = page_at(table, begin, PAGE)
        for start in range(begin, key_length, BLOCK_K):
            position = start + tl.arange(0, BLOCK_K)
            inside = position < key_length
            key = read_block(keys, page, start % PAGE, group, inside, GROUPS, WIDTH, PAGE, BLOCK_K, BLOCK_D, q.dtype)
            value = read_block(
                values, page, start % PAGE, group, inside, GROUPS, WIDTH, PAGE, BLOCK_K, BLOCK_D, q.dtype
            )
            # A step ahead: a load whose address is being loaded cannot overlap.
            page = page_at(table, tl.minimum(start + BLOCK_K, key_length - 1), PAGE)
            visible = position[None, :] <= (first + token)[:, None]
            if WINDOW is not None:
                visible &= position[None, :] > (first + token - WINDOW)[:, None]
            largest, total, mixed = add_block(
                q, key, value, visible, factor, largest, total, mixed, WINDOW is not None or SPLIT is not None
            )
            if SPLIT is not None and (start + BLOCK_K) % SPLIT == 0:
                all_largest, all_total, all_mixed = fold(all_largest, all_total, all_mixed, largest, total, mixed)
                largest, total, mixed = empty_softmax(BLOCK_Q, BLOCK_D)
        if SPLIT is not None:
            largest, total, mixed = fold(all_largest, all_total, all_mixed, largest, total, mixed)
        if value_scales is not None:
            mixed *= tl.load(value_scales + group)
        if lse is not None:
            at = lse + member.to(tl.int64) * tl.load(cu_seqlens + tl.num_programs(0)) + start_token + token
            tl.store(at, (largest + tl.log2(total)) / log2_e, mask=token < count)
        tl.store(out + place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=real)
