"""Triton kernels that move rollout tokens to their experts and back, on CUDA; twins in `expert_ops`.

    route      logits [T, E] -> the k experts of each token, and their shares
    dispatch   tokens sorted by expert, as numbers or codes, and the end of each expert's rows
    combine    the sum of each token's k outputs, in the order of the experts

No atomic additions, so results are reproducible. No host read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_rl.models.expert_ops import sorted_pairs
from megatron_rl.models.kernels import sink_for, write_row
from megatron_rl.quantization.recipe import PackedActivations, Packing

MOST_COUNTED = 4096
"""Up to so many (token, expert) pairs each `dispatch` program counts the pairs before its own; more are sorted."""
_COUNTED_AT_ONCE = 128
_PIECE = 1024
_SMALLEST = tl.constexpr(-(2**63))


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, over_all: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return shares [T, k] fp32 and experts [T, k] int32 of the largest ``logits`` [T, E] fp32, largest first.

    ``bias`` [E] is added first. The softmax is over the chosen experts, or all with ``over_all``. Ties go to the lower
    expert number.
    """
    tokens, experts = logits.shape
    shares = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    block = max(triton.next_power_of_2(experts), 32)
    route_kernel[(tokens,)](
        logits, bias, shares, chosen, experts, logits.stride(0), TOP_K=top_k, SLOTS=triton.next_power_of_2(top_k),
        BLOCK=block, OVER_ALL=over_all, num_warps=min(max(block // 128, 1), 8),
    )  # fmt: skip
    return shares, chosen


@triton.jit
def route_kernel(
    logits, bias, shares, chosen, experts, stride,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, OVER_ALL: tl.constexpr,
):  # fmt: skip
    """Choose the experts of each token; one program per token."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < experts
    x = tl.load(logits + token * stride + expert, mask=inside, other=float("-inf"))
    if bias is not None:
        x += tl.load(bias + expert, mask=inside, other=0.0).to(tl.float32)
    if OVER_ALL:
        x = _softmax(x)
    # One integer orders a float and its index: ties go to the first, and NaN still gives a valid expert.
    bits = x.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    ordered = tl.where(inside, (ordered << 32) | (BLOCK - 1 - expert).to(tl.int64), _SMALLEST)
    slot = tl.arange(0, SLOTS)
    values = tl.full((SLOTS,), float("-inf"), tl.float32)
    for index in tl.static_range(TOP_K):
        best = tl.max(ordered, 0)
        place = BLOCK - 1 - (best & 0xFFFFFFFF).to(tl.int32)
        tl.store(chosen + token * TOP_K + index, place)
        values = tl.where(slot == index, tl.sum(tl.where(expert == place, x, 0.0), 0), values)
        ordered = tl.where(ordered == best, _SMALLEST, ordered)
    if not OVER_ALL:
        values = _softmax(values)
    tl.store(shares + token * TOP_K + slot, values, mask=slot < TOP_K)


@triton.jit
def _softmax(x):
    powers = tl.exp(x - tl.max(x, 0))
    return powers / tl.sum(powers, 0)


def dispatch(
    tokens: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor, experts: int, packing: Packing | None
) -> tuple[torch.Tensor | PackedActivations, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``tokens`` [T, hidden] once for each of their local experts: N = T x min(k, ``experts``) rows.

    ``shares`` [T, k] fp32, ``chosen`` [T, k] int32 or int64; numbers from ``experts`` on belong to other ranks. Returns
    the rows, sorted by expert and then by token, as numbers or as in ``packing``; their shares [N]; the end of each
    expert's rows, [E] int32; and the rows of each token [T, k] int32 in expert order, -1 for other ranks. Rows after
    the last end are not written.
    """
    (count, columns), top_k, device = tokens.shape, chosen.shape[1], tokens.device
    rows, slots = count * min(top_k, experts), triton.next_power_of_2(top_k)
    written, sink = sink_for(tokens, rows, columns, packing)
    row_shares = torch.empty(rows, dtype=torch.float32, device=device)
    places = torch.empty(count, top_k, dtype=torch.int32, device=device)
    known, ends, others = None, torch.empty(experts, dtype=torch.int32, device=device), triton.cdiv(experts, slots)
    if chosen.numel() > MOST_COUNTED:
        _, order, ends = sorted_pairs(chosen, experts)
        known, others = torch.empty(len(order), dtype=torch.int32, device=device), 0
        known[order] = torch.arange(len(order), dtype=torch.int32, device=device)
    block = max(triton.next_power_of_2(sink["out_columns"]), 128)
    dispatch_kernel[(count + others,)](
        tokens, shares.contiguous(), chosen.contiguous(), known, ends, row_shares, places, count, experts, columns,
        tokens.stride(0), **sink, TOP_K=top_k, SLOTS=slots, CHUNK=_COUNTED_AT_ONCE, BLOCK=block,
        num_warps=min(max(block // 512, 4), 16),
    )  # fmt: skip
    return written, row_shares, ends, places


@triton.jit(do_not_specialize=["count", "scale_stride"])
def dispatch_kernel(
    tokens, shares, chosen, known, ends, row_shares, places, count, experts, columns, token_stride,
    out, scales, smoothing, out_columns, scale_stride, SEGMENTS: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one token per program below ``count``; each later program finds the ends of SLOTS experts.

    Both count the pairs before: a token's own pairs, or an expert's end.
    """
    program = tl.program_id(0)
    slot = tl.arange(0, SLOTS)
    is_token = program < count
    pair = program * TOP_K + slot
    expert = tl.load(chosen + pair, mask=is_token & (slot < TOP_K), other=experts).to(tl.int32)
    if known is not None:
        place = tl.load(known + pair, mask=slot < TOP_K, other=0)
    else:
        expert = tl.where(is_token, expert, (program - count) * SLOTS + slot)
        pair = tl.where(is_token, pair, count * TOP_K)
        place = _pairs_before(chosen, expert, pair, count * TOP_K, SLOTS, CHUNK)
    is_here = expert < experts
    if is_token:
        tl.store(row_shares + place, tl.load(shares + pair, mask=is_here, other=0.0), mask=is_here)
        key = tl.where(is_here, expert, experts + slot)
        rank = tl.sum((key[:, None] < key[None, :]).to(tl.int32), 0)
        tl.store(places + program * TOP_K + rank, tl.where(is_here, place, -1), mask=rank < TOP_K)
        column = tl.arange(0, BLOCK)
        inside = column < columns
        source = tokens + program.to(tl.int64) * token_stride + column
        numbers = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        for index in tl.static_range(TOP_K):
            row = tl.max(tl.where(is_here & (slot == index), place, -1), 0)
            if row >= 0:
                start = row.to(tl.int64)
                write_row(
                    numbers, start, column, inside, out, scales, smoothing, out_columns, scale_stride,
                    SEGMENTS, POWER_OF_TWO,
                )
    else:
        tl.store(ends + expert, place, mask=is_here)


@triton.jit
def _pairs_before(chosen, expert, pair, pairs, SLOTS: tl.constexpr, CHUNK: tl.constexpr):
    """Count the pairs before each ``pair`` [SLOTS] of ``expert`` [SLOTS], ordered by expert and then number."""
    found = tl.zeros((CHUNK, SLOTS), tl.int32)
    for start in range(0, pairs, CHUNK):
        other = start + tl.arange(0, CHUNK)
        of_other = tl.load(chosen + other, mask=other < pairs, other=2147483647).to(tl.int32)[:, None]
        is_same_before = (of_other == expert[None, :]) & (other[:, None] < pair[None, :])
        found += ((of_other < expert[None, :]) | is_same_before).to(tl.int32)
    return tl.sum(found, 0)


def combine(output: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Sum the rows of ``output`` [N, hidden] listed in ``places`` [T, k], in fp32: [T, hidden].

    Added in order and rounded once, like torch's ``scatter_add_`` on a CPU.
    """
    (tokens, top_k), columns = places.shape, output.shape[1]
    summed = output.new_empty(tokens, columns)
    block = min(max(triton.next_power_of_2(columns), 128), _PIECE)
    combine_kernel[(tokens, triton.cdiv(columns, block))](
        output, places, summed, columns, output.stride(0), TOP_K=top_k, BLOCK=block, num_warps=max(block // 256, 1)
    )
    return summed


@triton.jit
def combine_kernel(output, places, summed, columns, stride, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Sum up each token's experts; one program per token, or per piece of a row."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros((BLOCK,), tl.float32)
    for index in tl.static_range(TOP_K):
        row = tl.load(places + token * TOP_K + index).to(tl.int64)
        total += tl.load(output + row * stride + column, mask=inside & (row >= 0), other=0.0).to(tl.float32)
    tl.store(summed + token * columns + column, total.to(summed.dtype.element_ty), mask=inside)
