"""Triton kernels of the log-prob pass: each reads the logits once, with every number between in registers.

    statistics   largest logit, log of the sum of exp, target's logit, mean   [3 or 4, T] fp32, a program a row
    gradient     of the logits, in their dtype, over them if that is allowed  [T, V / tp], a program a stretch of a row

Of a bf16 logit that is 2 bytes in the forward pass, and 2 read and 2 written in the backward pass. The twins in plain
torch are in `logprobs`: log-probs, entropies and gradients differ by 1e-5, before gradients are rounded to the dtype.
Importing this module imports Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096
_LEAST = tl.constexpr(-1e38)
"""In the place of -inf where it meets a probability of 0, for their product would be NaN."""


def local_statistics(
    logits: torch.Tensor,
    targets: torch.Tensor,
    owned: torch.Tensor,
    columns: int,
    temperature: float,
    want_entropy: bool,
) -> torch.Tensor:
    """Compute what ``logits / temperature`` of this rank contribute to each row: [3, T] fp32, for the entropy [4, T].

    Args:
        logits: [T, held] of fp32, bf16 or fp16, of which the first ``columns`` are real.
        targets: [T] int64 columns; read where ``owned`` [T] bool says that they are here.
        columns: may be 0.
        temperature: above 0.
        want_entropy: for the fourth row.

    Returns:
        Largest logit, log of the sum of ``exp(logit - largest)``, the target's logit, the mean of ``logit - largest``;
        -inf, -inf, 0 and 0 where there are no columns.
    """
    rows, held = logits.shape
    statistics = torch.empty(4 if want_entropy else 3, rows, dtype=torch.float32, device=logits.device)
    statistics_kernel[(rows,)](
        _with_whole_rows(logits), targets.contiguous(), owned.contiguous(), statistics, rows, columns, held,
        logits.stride(0), temperature, 1.0 / temperature, ENTROPY=want_entropy, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return statistics


def logits_gradient(
    logits: torch.Tensor,
    known: tuple[torch.Tensor | None, ...],
    grads: tuple[torch.Tensor, torch.Tensor | None],
    columns: int,
    temperature: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write the gradient of ``logits`` [T, held] into ``out``, which may be ``logits`` itself; 0 from ``columns`` on.

    ``known`` [T] each: target's column, whether it is here, largest logit and log sum over all ranks, and the entropy
    where a gradient flows through it. ``grads``: of log-probs and entropies.
    """
    rows, held = logits.shape
    known, grads = (tuple(None if x is None else x.contiguous() for x in each) for each in (known, grads))
    of_entropies = None if known[-1] is None else grads[1]
    gradient_kernel[(rows, triton.cdiv(held, _BLOCK))](
        _with_whole_rows(logits), *known, grads[0], of_entropies, _with_whole_rows(out), columns, held,
        logits.stride(0), out.stride(0), 1.0 / temperature, BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    torch.autograd.graph.increment_version(out)  # whoever else saved it hears of it, as after an operation of torch
    return out


def _with_whole_rows(logits: torch.Tensor) -> torch.Tensor:
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError(f"the columns of a row of logits lie {logits.stride(1)} apart; give a contiguous tensor")
    return logits


# A mask at the last real column would be at any place, and each number loaded alone; at the padded width, a multiple of
# 16, they come in vectors. Vectors [T] begin anywhere where a batch is worked through in parts.


@triton.jit(do_not_specialize=["rows", "columns"], do_not_specialize_on_alignment=["targets", "owned", "statistics"])
def statistics_kernel(
    logits, targets, owned, statistics, rows, columns, held, stride, temperature, scale,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum up exponentials relative to the largest logit so far; sums are rescaled when there is a larger one."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + column, mask=column < held, other=0.0).to(tl.float32)
        x = tl.where(column < columns, x, float("-inf"))
        best = tl.maximum(largest, tl.max(x, 0))
        base = tl.where(best == float("-inf"), 0.0, best)  # -inf - -inf would be NaN
        # Differences before the division: they are exact or nearly, and small where it matters.
        shifted = (x - base) * scale
        powers = tl.exp(shifted)
        moved = tl.where(largest == float("-inf"), 0.0, (largest - base) * scale)
        if ENTROPY:
            weighted = (weighted + total * moved) * tl.exp(moved) + tl.sum(powers * tl.maximum(shifted, _LEAST), 0)
        total = total * tl.exp(moved) + tl.sum(powers, 0)
        largest = best
    place = statistics + row
    tl.store(place, tl.div_rn(largest, temperature))
    tl.store(place + rows, tl.log(total))
    is_here = tl.load(owned + row) != 0
    target = tl.load(logits + row * stride + tl.load(targets + row), mask=is_here, other=0.0).to(tl.float32)
    tl.store(place + 2 * rows, tl.div_rn(target, temperature))
    if ENTROPY:
        tl.store(place + 3 * rows, tl.where(total == 0.0, 0.0, weighted / total))


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
    all_logprobs = x * scale - tl.load(largest + row) - tl.load(log_sum + row)
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
