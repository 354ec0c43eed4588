"""Bookkeeping of a decode step in Triton kernels: two before the model and one after the draw.

    ahead    positions and random numbers of the next tokens
    cells    their cells in a paged cache
    record   store drawn tokens, log-probs, counts and positions; end rows

Bit-identical torch twins: `BatchState.ahead`, `PagedCache.slot_mapping` and `BatchState.record`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from megatron_rl import arithmetic

if TYPE_CHECKING:
    from megatron_rl.inference.batch_state import BatchState

_BLOCK = 128
_GAMMA, _POSITION = tl.constexpr(arithmetic.GAMMA), tl.constexpr(arithmetic.POSITION)
_MIX_1, _MIX_2 = tl.constexpr(arithmetic.MIX_1), tl.constexpr(arithmetic.MIX_2)


def ahead(state: BatchState, rows: int, steps: int, max_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `BatchState.ahead`."""
    positions = torch.empty(steps, rows, dtype=torch.int64, device=state.device)
    numbers = torch.empty(steps, rows, dtype=torch.float32, device=state.device)
    ahead_kernel[(steps, triton.cdiv(rows, _BLOCK))](
        state.position, state.seed, positions, numbers, rows, max_length - 1, BLOCK=_BLOCK, num_warps=4
    )
    return positions, numbers


@triton.jit(do_not_specialize=["rows", "last"])
def ahead_kernel(position, seed, positions, numbers, rows, last, BLOCK: tl.constexpr):
    """Compute positions and random numbers of the next steps; one program per step and BLOCK rows."""
    step, row = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < rows
    place = tl.minimum(tl.load(position + row, mask=is_row, other=0) + step, last.to(tl.int64))
    tl.store(positions + step * rows + row, place, mask=is_row)
    number = _uniform(tl.load(seed + row, mask=is_row, other=0), place + 1)
    tl.store(numbers + step * rows + row, number, mask=is_row)


@triton.jit
def _uniform(seeds, positions):
    """`arithmetic.uniform`: 64-bit integers wrap around, and the last steps are exact."""
    mixed = seeds.to(tl.uint64, bitcast=True) * _unsigned(_GAMMA)
    mixed += (positions + 1).to(tl.uint64, bitcast=True) * _unsigned(_POSITION)
    mixed = (mixed ^ (mixed >> 30)) * _unsigned(_MIX_1)
    mixed = (mixed ^ (mixed >> 27)) * _unsigned(_MIX_2)
    bits = ((mixed ^ (mixed >> 31)) & 0xFFFFFF).to(tl.int32)
    return (bits.to(tl.float32) + 0.5) * 5.9604644775390625e-08


@triton.jit
def _unsigned(number: tl.constexpr):
    return tl.full((1,), number, tl.int64).to(tl.uint64, bitcast=True)


def cells(table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return the cell of token i of row ``rows[i]`` at ``positions[..., i]`` in a paged cache, int64.

    ``table`` [rows, blocks per row] int32. See `PagedCache.slot_mapping`.
    """
    found = torch.empty_like(positions, memory_format=torch.contiguous_format)
    cells_kernel[(triton.cdiv(found.numel(), _BLOCK),)](
        table, rows, positions.contiguous(), found, found.numel(), len(rows), table.stride(0), SIZE=block_size,
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["total", "count"], do_not_specialize_on_alignment=["rows", "positions"])
def cells_kernel(table, rows, positions, found, total, count, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the cache cells of tokens; one program per BLOCK tokens."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < total
    row = tl.load(rows + token % count, mask=is_token, other=0)
    position = tl.load(positions + token, mask=is_token, other=0)
    block = tl.load(table + row * stride + position // SIZE, mask=is_token, other=0).to(tl.int64)
    tl.store(found + token, block * SIZE + position % SIZE, mask=is_token)


def record(state: BatchState, rows: slice | torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
    """See `BatchState.record`; a slice begins at 0. ``tokens`` and ``logprobs`` may have any row stride."""
    steps, count = tokens.shape
    record_kernel[(triton.cdiv(count, _BLOCK),)](
        rows if isinstance(rows, torch.Tensor) else None, tokens, logprobs, state.is_stop, state.token, state.position,
        state.count, state.limit, state.alive, state.tokens, state.logprobs, count, steps, tokens.stride(0),
        logprobs.stride(0), state.trash, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


# The drawn tokens may be a view of a longer run of steps.
@triton.jit(
    do_not_specialize=["rows_given", "steps", "token_stride", "logprob_stride", "trash"],
    do_not_specialize_on_alignment=["drawn", "drawn_logprobs"],
)
def record_kernel(
    chosen, drawn, drawn_logprobs, is_stop, token, position, count, limit, alive, tokens, logprobs,
    rows_given, steps, token_stride, logprob_stride, trash, BLOCK: tl.constexpr,
):  # fmt: skip
    """Record drawn tokens; one program per BLOCK rows, step by step; rows of ``tokens`` have ``trash`` + 1 columns."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = place < rows_given
    row = place if chosen is None else tl.load(chosen + place, mask=is_row, other=0)
    before = tl.load(count + row, mask=is_row, other=0)
    room = tl.load(limit + row, mask=is_row, other=0) - before
    was_alive = tl.load(alive + row, mask=is_row, other=0) != 0
    start = row.to(tl.int64) * (trash + 1)
    goes_on = was_alive
    has_stopped = place < 0
    added = tl.zeros((BLOCK,), tl.int64)
    last = tl.zeros((BLOCK,), tl.int64)
    for step in range(0, steps):
        last = tl.load(drawn + step * token_stride + place, mask=is_row, other=0)
        value = tl.load(drawn_logprobs + step * logprob_stride + place, mask=is_row, other=0.0)
        is_kept = goes_on & (step < room)
        column = tl.where(is_kept, before + step, trash)
        tl.store(tokens + start + column, last, mask=is_row)
        tl.store(logprobs + start + column, value, mask=is_row)
        added += is_kept.to(tl.int64)
        stops = tl.load(is_stop + last, mask=is_row, other=0) != 0
        has_stopped = has_stopped | stops
        goes_on = goes_on & ~stops
    tl.store(count + row, before + added, mask=is_row)
    tl.store(position + row, tl.load(position + row, mask=is_row, other=0) + added, mask=is_row)
    tl.store(token + row, last, mask=is_row)
    tl.store(alive + row, was_alive & (added < room) & ~has_stopped, mask=is_row)
