"""The grouped product of tokens with their experts' codes in one Triton kernel; the CPU twin is in `RowRecipe`.

Only the device knows the group sizes, so the host launches as many programs as there could be tiles, and each finds its
tile. No host read; one captured CUDA graph serves all sizes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_rl.quantization.kernels import MOST_SUMMED, tiles_for


def grouped_product(
    codes: torch.Tensor, weight_codes: torch.Tensor, scales: torch.Tensor, weight_scales: torch.Tensor,
    ends: torch.Tensor, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Compute ``(codes weight_codes^T) x scales x weight_scales^T`` of each group of rows: ``dtype`` [T, N].

    ``codes`` [T, K] sorted by expert, ``weight_codes`` [E, N, K], both int8 or float8_e4m3fn and contiguous along K;
    fp32 ``scales`` [T, 1] and ``weight_scales`` [E, N, 1], of any stride between experts. ``ends`` [E] int32: end of
    each group; later rows are not written. int8 has exact sums and one fp32 rounding per operation, so tiles change no
    result; fp8 sums are fp32.

    Raises:
        ValueError: K is above 133,144.
    """
    (tokens, depth), (experts, columns) = codes.shape, weight_codes.shape[:2]
    if depth > MOST_SUMMED:
        raise ValueError(f"sums of {depth} products could overflow int32; use at most {MOST_SUMMED} columns")
    out = torch.empty(tokens, columns, dtype=dtype, device=codes.device)
    tiles = tiles_for(triton.cdiv(tokens, experts))
    # Each group has at most one partial tile, and no tile is empty.
    row_tiles = min(tokens, tokens // tiles.rows + experts)
    grouped_kernel[(row_tiles * triton.cdiv(columns, tiles.columns),)](
        codes, weight_codes, out, scales, weight_scales, ends, row_tiles, experts, columns, depth, codes.stride(0),
        weight_codes.stride(1), out.stride(0), weight_codes.stride(0), weight_scales.stride(0),
        EXPERTS=triton.next_power_of_2(experts), ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=tiles.depth,
        STEPS=triton.cdiv(depth, tiles.depth), num_warps=tiles.warps, num_stages=tiles.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["row_tiles"])
def grouped_kernel(
    codes, weight_codes, out, scales, weight_scales, ends, row_tiles, experts, columns, depth, code_stride,
    weight_stride, out_stride, expert_stride, expert_scale_stride,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Multiply the codes of a tile of one group. Row tiles come first, so that weights are reused from the L2 cache."""
    row_tile, column_tile = tl.program_id(0) % row_tiles, tl.program_id(0) // row_tiles
    number = tl.arange(0, EXPERTS)
    end = tl.load(ends + number, mask=number < experts, other=0)
    start = tl.load(ends + number - 1, mask=(number > 0) & (number < experts), other=0)
    tiles = tl.where(number < experts, tl.cdiv(end - start, ROWS), 0)
    behind = tl.cumsum(tiles, 0)
    expert = tl.sum((behind <= row_tile).to(tl.int32), 0)
    if expert < experts:  # else there are fewer tiles than there could be
        mine = number == expert
        first = tl.sum(tl.where(mine, start + (row_tile - behind + tiles) * ROWS, 0), 0)
        row = first + tl.arange(0, ROWS)
        column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        step = tl.arange(0, DEPTH)
        real_row, real_column = row < tl.sum(tl.where(mine, end, 0), 0), column < columns
        a = codes + row[:, None].to(tl.int64) * code_stride + step[None, :]
        b = weight_codes + expert.to(tl.int64) * expert_stride
        b += column[None, :].to(tl.int64) * weight_stride + step[:, None]
        sums: tl.constexpr = tl.int32 if codes.dtype.element_ty == tl.int8 else tl.float32
        result = tl.zeros((ROWS, COLUMNS), dtype=sums)
        for index in range(0, STEPS):
            rest = step < depth - index * DEPTH
            left = tl.load(a, mask=real_row[:, None] & rest[None, :], other=0.0)
            right = tl.load(b, mask=real_column[None, :] & rest[:, None], other=0.0)
            # Without the last argument Hopper accumulates fp8 products in fewer bits than fp32.
            result = tl.dot(left, right, result, out_dtype=sums, max_num_imprecise_acc=0)
            a += DEPTH
            b += DEPTH
        by_row = tl.load(scales + row, mask=real_row, other=0.0)[:, None]
        by_column = tl.load(weight_scales + expert * expert_scale_stride + column, mask=real_column, other=0.0)[None, :]
        result = result.to(tl.float32) * by_row * by_column
        place = out + row[:, None].to(tl.int64) * out_stride + column[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=real_row[:, None] & real_column[None, :])
