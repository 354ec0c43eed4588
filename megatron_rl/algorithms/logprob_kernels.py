"""Triton kernels of the log-prob pass: each reads the logits once, with every number between in registers.

    statistics   largest logit, sum of exp, target's logit, and for the entropy   [3 or 4, T] fp32, a program a row
    finish       log-probs and entropies of the statistics of all shards          [4, T]
    gradient     of the logits, in their dtype, over them if that is allowed      [T, V / tp], a program a stretch

Of a bf16 logit that is 2 bytes in the forward pass, and 2 read and 2 written in the backward pass. The twins in plain
torch are in `logprobs`: log-probs, entropies and gradients differ by 1e-5, before gradients are rounded to the dtype.

The draw of rollouts (`inference/sampling_kernel.py`) adds up a row with the same functions in the same order, so that a
token has the same log-prob there and here, to the bit: chunks of 4096 columns of a vocabulary shard, then the shard's
chunks, then the shards by rank. Importing this module imports Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 4096
_LEAST = tl.constexpr(-1e38)
"""In the place of -inf where it meets a probability of 0, for their product would be NaN."""


def local_statistics(
    logits: torch.Tensor, targets: torch.Tensor, owned: torch.Tensor, columns: int, temperature: float,
    want_entropy: bool,
) -> torch.Tensor:  # fmt: skip
    """Compute what this rank's ``logits`` contribute to each row: [3, T] fp32, for the entropy [4, T].

    Of ``logits`` [T, held] the first ``columns`` are real, perhaps none. ``targets`` [T] int64 are columns, read where
    ``owned`` [T] bool says that they are here. The result is the largest logit m, the sum of
    ``exp((x - m) / temperature)``, the target's logit, and the sum of these terms times their exponents.
    """
    rows, held = logits.shape
    statistics = torch.empty(4 if want_entropy else 3, rows, dtype=torch.float32, device=logits.device)
    statistics_kernel[(rows,)](
        _with_whole_rows(logits), targets.contiguous(), owned.contiguous(), statistics, rows, columns, held,
        logits.stride(0), temperature, ENTROPY=want_entropy, CHUNK=CHUNK,
        CHUNKS=triton.next_power_of_2(triton.cdiv(held, CHUNK)), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return statistics


def finished(statistics: torch.Tensor, temperature: float) -> list[torch.Tensor]:
    """Return log-probs, largest logits, logs of the sums and, if asked for, entropies: [T] each.

    ``statistics`` [shards, 3 or 4, T] as of `local_statistics`, in the order of the ranks.
    """
    shards, kinds, rows = statistics.shape
    out = torch.empty(kinds, rows, dtype=torch.float32, device=statistics.device)
    finish_kernel[(rows,)](
        statistics.contiguous(), out, rows, shards, temperature, ENTROPY=kinds == 4,
        SHARDS=triton.next_power_of_2(shards), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return list(out)


def logits_gradient(
    logits: torch.Tensor, known: tuple[torch.Tensor | None, ...], grads: tuple[torch.Tensor, torch.Tensor | None],
    columns: int, temperature: float, out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Write the gradient of ``logits`` [T, held] into ``out``, which may be ``logits`` itself; 0 from ``columns`` on.

    ``known`` [T] each: target's column, whether it is here, largest logit and log sum over all ranks, and the entropy
    where a gradient flows through it. ``grads``: of log-probs and entropies.
    """
    rows, held = logits.shape
    known, grads = (tuple(None if x is None else x.contiguous() for x in each) for each in (known, grads))
    of_entropies = None if known[-1] is None else grads[1]
    gradient_kernel[(rows, triton.cdiv(held, CHUNK))](
        _with_whole_rows(logits), *known, grads[0], of_entropies, _with_whole_rows(out), columns, held,
        logits.stride(0), out.stride(0), 1.0 / temperature, BLOCK=CHUNK, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    torch.autograd.graph.increment_version(out)  # whoever else saved it hears of it, as after an operation of torch
    return out


def _with_whole_rows(logits: torch.Tensor) -> torch.Tensor:
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError(f"the columns of a row of logits lie {logits.stride(1)} apart; give a contiguous tensor")
    return logits


# A mask at the last real column would be at any place, and each number loaded alone; at the padded width, a multiple of
# 16, they come in vectors. Vectors [T] begin anywhere where a batch is worked through in parts.


@triton.jit
def pairwise_sum(x):
    """Add up ``x``, a power of two of numbers, two by two: an order that is the same in every layout over threads.

    The order of ``tl.sum`` over more than two numbers is the compiler's, which chooses by dtype, alignment and warps.
    """
    if x.shape[0] >= 1024:  # first what one thread has, or else each of its numbers would be exchanged
        x = tl.sum(tl.reshape(x, (2, x.shape[0] // 2)), 0)
        x = tl.sum(tl.reshape(x, (2, x.shape[0] // 2)), 0)
    for _ in tl.static_range(32):
        if x.shape[0] > 1:
            x = tl.sum(tl.reshape(x, (x.shape[0] // 2, 2)), 1)
    return tl.sum(x, 0)


@triton.jit
def shifted(x, largest, scale):
    """``(x - largest) * scale``; the difference comes first: it is exact or nearly, and small where it matters."""
    return (x - tl.where(largest == float("-inf"), 0.0, largest)) * scale  # -inf - -inf would be NaN


@triton.jit
def fold(largest, sums, scale):
    """Return the largest logit and the sum of exponentials of parts that have these; both [parts]."""
    overall = tl.max(largest, 0)
    return overall, pairwise_sum(sums * tl.exp(shifted(largest, overall, scale)))


@triton.jit(
    do_not_specialize=["rows", "columns", "temperature"],
    do_not_specialize_on_alignment=["targets", "owned", "statistics"],
)
def statistics_kernel(
    logits, targets, owned, statistics, rows, columns, held, stride, temperature,
    ENTROPY: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Sum up the exponentials of each chunk, then fold the chunks."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.div_rn(1.0, temperature)
    each = tl.arange(0, CHUNKS)
    largest = tl.full((CHUNKS,), float("-inf"), tl.float32)
    sums = tl.full((CHUNKS,), 0.0, tl.float32)
    weighted = tl.full((CHUNKS,), 0.0, tl.float32)
    for chunk in range(0, tl.cdiv(columns, CHUNK)):
        column = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row * stride + column, mask=column < held, other=0.0).to(tl.float32)
        x = tl.where(column < columns, x, float("-inf"))
        best = tl.max(x, 0)
        exponents = shifted(x, best, scale)
        powers = tl.exp(exponents)
        largest = tl.where(each == chunk, best, largest)
        sums = tl.where(each == chunk, pairwise_sum(powers), sums)
        if ENTROPY:
            weighted = tl.where(each == chunk, tl.sum(powers * tl.maximum(exponents, _LEAST), 0), weighted)
    overall, total = fold(largest, sums, scale)
    place = statistics + row
    tl.store(place, overall)
    tl.store(place + rows, total)
    is_here = tl.load(owned + row) != 0
    target = tl.load(logits + row * stride + tl.load(targets + row), mask=is_here, other=0.0).to(tl.float32)
    tl.store(place + 2 * rows, target)
    if ENTROPY:
        tl.store(place + 3 * rows, _fold_weighted(largest, sums, weighted, overall, scale))


@triton.jit
def _fold_weighted(largest, sums, weighted, overall, scale):
    exponents = shifted(largest, overall, scale)
    return tl.sum(tl.exp(exponents) * (weighted + sums * tl.maximum(exponents, _LEAST)), 0)


@triton.jit(do_not_specialize=["rows", "shards", "temperature"], do_not_specialize_on_alignment=["statistics", "out"])
def finish_kernel(statistics, out, rows, shards, temperature, ENTROPY: tl.constexpr, SHARDS: tl.constexpr):
    """Fold the shards of a row; one program per row."""
    row = tl.program_id(0)
    scale = tl.div_rn(1.0, temperature)
    shard = tl.arange(0, SHARDS)
    inside = shard < shards
    kinds: tl.constexpr = 4 if ENTROPY else 3
    place = statistics + shard * kinds * rows + row
    largest = tl.load(place, mask=inside, other=float("-inf"))
    sums = tl.load(place + rows, mask=inside, other=0.0)
    target = tl.sum(tl.load(place + 2 * rows, mask=inside, other=0.0), 0)  # 0 but on one rank
    overall, total = fold(largest, sums, scale)
    tl.store(out + row, shifted(target, overall, scale) - tl.log(total))
    tl.store(out + rows + row, overall)
    tl.store(out + 2 * rows + row, tl.log(total))
    if ENTROPY:
        weighted = tl.load(place + 3 * rows, mask=inside, other=0.0)
        mean = _fold_weighted(largest, sums, weighted, overall, scale) / total
        tl.store(out + 3 * rows + row, tl.log(total) - mean)


@triton.jit(
    do_not_specialize=["columns"],
    do_not_specialize_on_alignment=[
        "targets", "owned", "largest", "log_sum", "entropies", "grad_logprobs", "grad_entropies",
    ],
)  # fmt: skip
def gradient_kernel(
    logits, targets, owned, largest, log_sum, entropies, grad_logprobs, grad_entropies, out,
    columns, held, stride, out_stride, scale, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write, x = logits / temperature: d log p(v) / dx = [v is target] - p, d entropy / dx = -p (log p + entropy)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + column, mask=column < held, other=0.0).to(tl.float32)
    all_logprobs = (x - tl.load(largest + row)) * scale - tl.load(log_sum + row)
    of_target = tl.load(grad_logprobs + row) * scale
    slope = -of_target
    if entropies is not None:
        finite = tl.maximum(all_logprobs, _LEAST)
        slope -= (finite + tl.load(entropies + row)) * (tl.load(grad_entropies + row) * scale)
    grad = tl.exp(all_logprobs) * slope
    is_target = (column == tl.load(targets + row)) & (tl.load(owned + row) != 0)
    grad += tl.where(is_target, of_target, 0.0)
    grad = tl.where(column < columns, grad, 0.0)
    tl.store(out + row * out_stride + column, grad.to(out.dtype.element_ty), mask=column < held)
