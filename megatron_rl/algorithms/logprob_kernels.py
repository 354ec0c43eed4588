"""Triton kernels of the log-prob pass: each reads the logits once and keeps intermediate values in registers.

    statistics   target's logit; per chunk: largest logit, sum of exp, and for the entropy   [.., T], a program per row
    finish       log-probs and entropies from the chunks of all shards                       [3 or 4, T]
    gradient     of the logits, in their dtype, in place if allowed         [T, V / tp], a program per piece of a row

For bf16 logits that is 2 bytes read in the forward pass, and 2 read and 2 written in the backward pass. The twins in
plain torch are in `logprobs`: log-probs, entropies and gradients (before rounding) differ by 1e-5. The rollout's draw
(`inference/sampling_kernel.py`) sums the same chunks with the same functions, so log-probs are bit-identical. Importing
this module imports Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 4096
_LEAST = tl.constexpr(-1e38)
"""Replaces -inf where the probability is 0, because their product would be NaN."""


def local_statistics(
    logits: torch.Tensor, targets: torch.Tensor, owned: torch.Tensor, columns: int, temperature: float,
    want_entropy: bool,
) -> torch.Tensor:  # fmt: skip
    """Compute this rank's contribution to each row: [1 + 2 chunks, T] fp32, with entropy [1 + 3 chunks, T].

    The first ``columns`` of ``logits`` [T, held] are real, possibly none. ``targets`` [T] int64 are columns, valid
    where ``owned`` [T] bool. Result: the target's logit; per chunk the largest logit m, the sum of ``exp((x - m) /
    temperature)``, and the sum of these terms times their exponents.
    """
    rows, held = logits.shape
    chunks = triton.cdiv(held, CHUNK)
    numbers = 1 + (3 if want_entropy else 2) * chunks
    statistics = torch.empty(numbers, rows, dtype=torch.float32, device=logits.device)
    statistics_kernel[(rows,)](
        _with_whole_rows(logits), targets.contiguous(), owned.contiguous(), statistics, rows, columns, held,
        logits.stride(0), chunks, temperature, ENTROPY=want_entropy, CHUNK=CHUNK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return statistics


def finished(statistics: torch.Tensor, temperature: float, has_entropy: bool) -> list[torch.Tensor]:
    """Return log-probs, largest logits, logs of the sums and optionally entropies: [T] each.

    ``statistics`` [shards, .., T] from `local_statistics`, in rank order.
    """
    shards, numbers, rows = statistics.shape
    each = (numbers - 1) // (3 if has_entropy else 2)
    out = torch.empty(4 if has_entropy else 3, rows, dtype=torch.float32, device=statistics.device)
    finish_kernel[(rows,)](
        statistics, out, rows, numbers, each, shards, temperature, ENTROPY=has_entropy,
        SHARDS=triton.next_power_of_2(shards), CHUNKS=triton.next_power_of_2(shards * each), num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    return list(out)


def logits_gradient(
    logits: torch.Tensor, known: tuple[torch.Tensor | None, ...], grads: tuple[torch.Tensor, torch.Tensor | None],
    columns: int, temperature: float, out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Write the gradient of ``logits`` [T, held] into ``out`` (may be ``logits``); 0 from ``columns`` on.

    ``known`` [T] each: target's column, whether it is owned, largest logit and log sum over all ranks, and the entropy
    if it has a gradient. ``grads``: of log-probs and entropies.
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


# A mask at the last real column could end anywhere, so numbers would be loaded one by one; at the padded width, a
# multiple of 16, loads are vectorised. Vectors [T] may start at any alignment, for parts of a batch.


@triton.jit
def pairwise_sum(x):
    """Sum ``x``, a power of two of numbers, pairwise: an order independent of the thread layout.

    The compiler chooses the order of ``tl.sum`` by dtype, alignment and warps.
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
    """Return ``(x - largest) * scale``; the difference first, because it is (nearly) exact and small."""
    return (x - tl.where(largest == float("-inf"), 0.0, largest)) * scale  # -inf - -inf would be NaN


@triton.jit
def fold(largest, sums, scale):
    """Combine parts: return the largest logit and the sum of exponentials; inputs [parts]."""
    overall = tl.max(largest, 0)
    return overall, pairwise_sum(sums * tl.exp(shifted(largest, overall, scale)))


@triton.jit(
    do_not_specialize=["rows", "columns", "chunks", "temperature"],
    do_not_specialize_on_alignment=["targets", "owned", "statistics"],
)
def statistics_kernel(
    logits, targets, owned, statistics, rows, columns, held, stride, chunks, temperature,
    ENTROPY: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the target's logit and the statistics of each chunk."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.div_rn(1.0, temperature)
    for chunk in range(0, chunks):
        column = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row * stride + column, mask=column < held, other=0.0).to(tl.float32)
        x = tl.where(column < columns, x, float("-inf"))
        best = tl.max(x, 0)
        exponents = shifted(x, best, scale)
        powers = tl.exp(exponents)
        place = statistics + (1 + chunk) * rows + row
        tl.store(place, best)
        tl.store(place + chunks * rows, pairwise_sum(powers))
        if ENTROPY:
            tl.store(place + 2 * chunks * rows, tl.sum(powers * tl.maximum(exponents, _LEAST), 0))
    is_here = tl.load(owned + row) != 0
    target = tl.load(logits + row * stride + tl.load(targets + row), mask=is_here, other=0.0).to(tl.float32)
    tl.store(statistics + row, target)


@triton.jit(
    do_not_specialize=["rows", "numbers", "each", "shards", "temperature"],
    do_not_specialize_on_alignment=["statistics", "out"],
)
def finish_kernel(
    statistics, out, rows, numbers, each, shards, temperature,
    ENTROPY: tl.constexpr, SHARDS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Combine the chunks of a row, in the order of the shards; one program per row."""
    row = tl.program_id(0)
    scale = tl.div_rn(1.0, temperature)
    shard, chunk = tl.arange(0, SHARDS), tl.arange(0, CHUNKS)
    inside = chunk < shards * each
    place = statistics + (chunk // each * numbers + 1 + chunk % each) * rows + row
    largest = tl.load(place, mask=inside, other=float("-inf"))
    sums = tl.load(place + each * rows, mask=inside, other=0.0)
    overall, total = fold(largest, sums, scale)
    targets = tl.load(statistics + shard * numbers * rows + row, mask=shard < shards, other=0.0)  # 0 but on one rank
    tl.store(out + row, shifted(tl.sum(targets, 0), overall, scale) - tl.log(total))
    tl.store(out + rows + row, overall)
    tl.store(out + 2 * rows + row, tl.log(total))
    if ENTROPY:
        exponents = shifted(largest, overall, scale)
        weighted = tl.load(place + 2 * each * rows, mask=inside, other=0.0) + sums * tl.maximum(exponents, _LEAST)
        tl.store(out + 3 * rows + row, tl.log(total) - tl.sum(tl.exp(exponents) * weighted, 0) / total)


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
    """Write, with x = logits / temperature: d log p(v) / dx = [v is target] - p, d entropy / dx = -p (log p + entropy).
    """
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
