"""The draw of `sampler.draw` on a GPU, in two kernels that read the logits once, in vocabulary chunks of 4096.

    chunks   largest logit, its column, sum of exp   [N, chunks]
    select   the chunk that the random number falls into, then the token within it

A row-wise ``cumsum`` over 150,000 columns would be 149 sequential passes of one thread block. Importing this module
imports Triton. The torch twin is `sampler.draw_by_columns`; tokens differ only where the random number is within
rounding of a border, log-probs by 1e-5. Log-probs equal those of the trainer's kernels
(`algorithms/logprob_kernels.py`) bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_rl.algorithms.logprob_kernels import CHUNK, fold, pairwise_sum, shifted


def draw_by_chunks(
    logits: torch.Tensor, numbers: torch.Tensor, temperature: torch.Tensor | None = None,
    greedy: torch.Tensor | None = None, shard: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return token ids [N] int64 and their log-probs [N] fp32, from ``logits`` [N, V] fp32 of any row stride.

    ``numbers`` [N] fp32 in (0, 1]; ``temperature`` [N] fp32 or None (all 1); ``greedy`` [N] bool or None. -inf masks a
    token. ``shard``: padded vocabulary columns per tensor-parallel rank of the trainer; None: all. No host read.
    """
    rows, columns = logits.shape
    shard = columns if shard is None else shard
    each = triton.cdiv(shard, CHUNK)  # chunks begin anew with each shard
    chunks = triton.cdiv(columns, shard) * each
    largest, sums = torch.empty(2, rows, chunks, dtype=torch.float32, device=logits.device).unbind()
    places = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    layout = columns, logits.stride(0), shard, each, chunks
    chunks_kernel[(rows, chunks)](
        logits, temperature, largest, sums, places, *layout, CHUNK=CHUNK, num_warps=8, enable_fp_fusion=False
    )
    select_kernel[(rows,)](
        logits, numbers, temperature, greedy, largest, sums, places, tokens, logprobs, *layout, CHUNK=CHUNK,
        CHUNKS=triton.next_power_of_2(chunks), num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return tokens, logprobs


# With an odd column count every other row is only 4-byte aligned (8-byte for the numbers): see `attention.kernels`.


@triton.jit(
    do_not_specialize=["columns", "stride", "shard", "each", "chunks"],
    do_not_specialize_on_alignment=["logits", "temperature", "largest", "sums", "places"],
)
def chunks_kernel(
    logits, temperature, largest, sums, places, columns, stride, shard, each, chunks, CHUNK: tl.constexpr
):  # fmt: skip
    """Sum up each chunk's exponentials; one program per (row, chunk)."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    column, inside = _columns_of(chunk, columns, shard, each, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * stride + column, mask=inside, other=float("-inf"))
    best = tl.max(x, 0)
    place = row * chunks + chunk
    tl.store(largest + place, best)
    tl.store(places + place, tl.min(tl.where(x == best, column, columns), 0))
    tl.store(sums + place, pairwise_sum(tl.exp(shifted(x, best, _scale(temperature, row)))))


@triton.jit
def _columns_of(chunk, columns, shard, each, CHUNK: tl.constexpr):
    """Return the columns of a chunk, and a mask of the valid ones."""
    in_shard = (chunk % each) * CHUNK + tl.arange(0, CHUNK)
    column = chunk // each * shard + in_shard
    return column, (in_shard < shard) & (column < columns)


@triton.jit
def _scale(temperature, row):
    scale = 1.0
    if temperature is not None:
        scale = tl.div_rn(1.0, tl.load(temperature + row))
    return scale


@triton.jit(
    do_not_specialize=["columns", "stride", "shard", "each", "chunks"],
    do_not_specialize_on_alignment=["logits", "numbers", "temperature", "greedy", "largest", "sums", "places"],
)
def select_kernel(
    logits, numbers, temperature, greedy, largest, sums, places, tokens, logprobs, columns, stride, shard, each, chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Draw each row's token; one program per row."""
    row = tl.program_id(0)
    scale = _scale(temperature, row)
    index = tl.arange(0, CHUNKS)
    known = index < chunks
    of_chunk = tl.load(largest + row * chunks + index, mask=known, other=float("-inf"))
    masses = tl.load(sums + row * chunks + index, mask=known, other=0.0)
    best, total = fold(of_chunk, masses, scale)
    masses *= tl.exp(shifted(of_chunk, best, scale))
    target = tl.load(numbers + row) * total
    chunk = _first_to_reach(target, masses, index)
    before = tl.sum(tl.where(index < chunk, masses, 0.0), 0)
    column, inside = _columns_of(chunk, columns, shard, each, CHUNK)
    start = logits + row.to(tl.int64) * stride
    x = tl.load(start + column, mask=inside, other=float("-inf"))
    token = _first_to_reach(target - before, tl.exp(shifted(x, best, scale)), column)
    if greedy is not None:
        where = tl.load(places + row * chunks + index, mask=known, other=columns)
        first = tl.min(tl.where(of_chunk == best, where, columns), 0)
        token = tl.where(tl.load(greedy + row) != 0, first, token)
    token = tl.minimum(token, columns - 1)  # logits that are NaN: some token, and a log-prob that is NaN
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, shifted(tl.load(start + token), best, scale) - tl.log(total))


@triton.jit
def _first_to_reach(target, masses, index):
    """Return the first ``index`` with a mass at which the sum of ``masses`` reaches ``target``, else the last with one.

    Parallel prefix sums are not quite monotone, so an increase without a mass may be rounding.
    """
    reached = (tl.cumsum(masses, 0) >= target) & (masses > 0)
    last = tl.max(tl.where(masses > 0, index, 0), 0)
    return tl.min(tl.where(reached, index, last), 0)
