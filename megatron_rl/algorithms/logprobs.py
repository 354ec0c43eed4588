"""Log-probs of the tokens of a packed batch; the vocabulary may be split across a tensor-parallel group.

The logits at index t predict token t + 1; everywhere else token t's log-prob is at index t. Only ``selected_logprobs``
shifts between the two. On ``P0 P1 A0 E``::

    logits at                  P0          P1          A0          E
    predict                    P1          A0          E           (nothing)
    result at index            1           2           3
    selected_logprobs      0   log p(P1)   log p(A0)   log p(E)

The backward pass recomputes the softmax, so there is no fp32 copy of the logits. On CUDA two kernels read the logits
once each (`logprob_kernels`); the twin in plain torch processes a few rows at a time. Fused with the output layer, the
logits are not stored either: their product is computed for a few rows at a time, and again in the backward pass. That
costs a fourth product beside three, and saves the logits, [T, V / tp].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rl.algorithms.context import Share
from megatron_rl.arithmetic import FEWEST_LOGIT_ROWS, PRODUCT_ELEMENTS

CPU_CHUNK_ELEMENTS = 2**20
"""Logits per step in plain torch: temporaries larger than a CPU's cache made the pass twice as slow."""

CPU_PRODUCT_ELEMENTS = 2**24
"""`PRODUCT_ELEMENTS` on a CPU: 64 MiB in fp32. Not tuned."""

Entropy = Literal["none", "detached", "differentiable"]


def selected_logprobs(
    output: Tensor, token_ids: Tensor, position_ids: Tensor, *, vocab_size: int, weight: Tensor | None = None,
    temperature: float = 1.0, vocab_start: int = 0, tensor_group: dist.ProcessGroup | None = None,
    entropy: Entropy = "none", share: Share | None = None, context_group: dist.ProcessGroup | None = None,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute the log-prob of each token of a packed batch under ``softmax(logits / temperature)``.

    All ranks of the tensor group call this with the same tokens and get the same result; a rank's gradient is that of
    its shard, assuming that every rank computes the same loss.

    Args:
        output: logits [T, V / tp], any float type: this rank's columns, real ones followed by padding. With ``weight``
            the hidden states [T, H], whose gradient must be summed over the tensor group.
        token_ids: [T] int64.
        position_ids: [T] int64, 0 at the first token of every sequence (and at index 0).
        vocab_size: the tokenizer's; further columns are padding with probability 0.
        weight: [V / tp, H] of the output layer, this rank's rows, to compute the logits here.
        temperature: of the sampled distribution; above 0.
        vocab_start: the id of this rank's first column.
        tensor_group: the ranks that hold the other columns; None if this rank holds all.
        entropy: whether to return it, and whether it has a gradient.
        share: the W of T tokens in ``output``; None: all.
        context_group: the context-parallel ranks of ``share``.
        overwrite: the backward pass may write the gradient over the logits. If autograd reads them later, for
            example in a second backward pass, it raises a ``RuntimeError``.

    Returns:
        Log-probs, and the entropy in nats of the distribution that token t was drawn from, or None. Both [T] fp32 (fp64
        for fp64 logits), 0 at the first token of every sequence; an id outside ``[0, vocab_size)`` has log-prob -inf.
    """
    shard = Shard(vocab_start, vocab_size, temperature, tensor_group)
    # logits[:-1] would cost a full copy in the backward pass. The one wrong pair, the last logits with the first token,
    # is at index 0, which is set to 0 below.
    targets = token_ids.roll(-1)
    if share is not None:
        targets = targets[share.local]
    at_logits, entropy_at_logits = _TargetLogprobs.apply(output, weight, targets, shard, entropy, overwrite)
    if share is not None:
        at_logits = share.whole(at_logits, context_group)
        entropy_at_logits = None if entropy_at_logits is None else share.whole(entropy_at_logits, context_group)
    predicted = position_ids > 0
    logprobs = torch.where(predicted, at_logits.roll(1), 0.0)
    return logprobs, None if entropy_at_logits is None else torch.where(predicted, entropy_at_logits.roll(1), 0.0)


@dataclass(frozen=True)
class Shard:
    """This rank's part of the vocabulary, and the temperature."""

    vocab_start: int
    vocab_size: int
    temperature: float
    tensor_group: dist.ProcessGroup | None

    def columns(self, held: int) -> int:
        """Return how many of this rank's ``held`` columns are real tokens; the others are padding."""
        return max(0, min(self.vocab_size - self.vocab_start, held))

    def chunks(self, logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield row ranges and their scaled logits: a new tensor [rows, columns] in fp32 or better."""
        columns = self.columns(logits.shape[1])
        rows = max(1, CPU_CHUNK_ELEMENTS // max(columns, 1))
        for start in range(0, logits.shape[0] if columns else 0, rows):
            part = slice(start, start + rows)
            chunk = logits[part, :columns].to(torch.promote_types(logits.dtype, torch.float32), copy=True)
            yield part, chunk if self.temperature == 1.0 else chunk.div_(self.temperature)


class _TargetLogprobs(torch.autograd.Function):
    """Log-prob of ``targets[t]`` and the entropy under the logits of t: all [T], no shift."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, weight: Tensor | None, targets: Tensor, shard: Shard, entropy: Entropy,
        overwrite: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        local = targets - shard.vocab_start
        owned = (local >= 0) & (local < shard.columns(output.shape[1] if weight is None else weight.shape[0]))
        columns = torch.where(owned, local, 0)  # of the targets that are here
        parts = [
            _local_statistics(logits, columns[rows], owned[rows], shard, entropy != "none")
            for rows, logits in _products(output, weight)
        ]
        logprobs, largest, log_sum, entropies = (*_combine(torch.cat(parts, dim=1), shard, entropy != "none"), None)[:4]
        logprobs = torch.where((targets >= 0) & (targets < shard.vocab_size), logprobs, -torch.inf)

        ctx.shard, ctx.differentiable_entropy, ctx.overwrite = shard, entropy == "differentiable", overwrite
        ctx.save_for_backward(output, weight, columns, owned, largest, log_sum, entropies)
        if entropies is not None and not ctx.differentiable_entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        output, weight, *known, entropies = ctx.saved_tensors
        known = (*known, entropies if ctx.differentiable_entropy else None)
        if weight is None:
            out = output.detach() if ctx.overwrite else torch.empty_like(output)
            _logits_gradient(output, known, grad_logprobs, grad_entropies, ctx.shard, out)
            return out, None, None, None, None, None
        grad_output = torch.empty_like(output)
        # fp32: a bf16 sum of many products drifts. Frozen weights need none.
        exact, grad_weight = torch.promote_types(weight.dtype, torch.float32), None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=exact)
        for rows, logits in _products(output, weight):
            own = tuple(None if values is None else values[rows] for values in (*known, grad_entropies))
            grad = _logits_gradient(logits, own[:-1], grad_logprobs[rows], own[-1], ctx.shard, out=logits)
            torch.mm(grad, weight, out=grad_output[rows])
            if grad_weight is None:
                continue
            if grad_weight.dtype == grad.dtype:
                grad_weight.addmm_(grad.t(), output[rows])
            else:
                grad_weight += grad.t() @ output[rows]
        return grad_output, grad_weight if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def runs_kernels(logits: Tensor) -> bool:
    """Return whether these logits use the kernels, which compute in fp32."""
    return logits.is_cuda and logits.dtype != torch.float64


def _products(output: Tensor, weight: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Yield row ranges and their logits [rows, V / tp], in the model's dtype; fused, all in the same buffer."""
    if weight is None:
        yield slice(None), output
        return
    elements = CPU_PRODUCT_ELEMENTS if output.device.type == "cpu" else PRODUCT_ELEMENTS
    size = max(FEWEST_LOGIT_ROWS, elements // weight.shape[0])
    memory = output.new_empty(min(size, output.shape[0]), weight.shape[0])
    for start in range(0, output.shape[0], size):
        rows = slice(start, start + size)
        part = output[rows]
        yield rows, torch.mm(part, weight.t(), out=memory[: len(part)])


def _logits_gradient(
    logits: Tensor, known: tuple[Tensor | None, ...], grad_logprobs: Tensor, grad_entropies: Tensor | None,
    shard: Shard, out: Tensor,
) -> Tensor:  # fmt: skip
    """Write the gradient of ``logits`` [rows, V / tp] into ``out``, which may be ``logits``.

    ``known`` per row: column and ownership of the target, largest logit, log sum, and the entropy if it has a gradient.
    """
    if runs_kernels(logits):
        from megatron_rl.algorithms.logprob_kernels import logits_gradient

        real = shard.columns(logits.shape[1])
        return logits_gradient(logits, known, (grad_logprobs, grad_entropies), real, shard.temperature, out)
    columns, owned, largest, log_sum, entropies = known
    out[:, shard.columns(logits.shape[1]) :] = 0
    # With x = logits / temperature: d log p(target) / dx = [v is target] - p.
    grad_all = -grad_logprobs[:, None] / shard.temperature
    grad_target = torch.where(owned[:, None], -grad_all, 0.0)
    for rows, chunk in shard.chunks(logits):
        all_logprobs = chunk.sub_(largest[rows, None]).sub_(log_sum[rows, None])
        if entropies is not None:
            probabilities = all_logprobs.exp()
            grad = probabilities * grad_all[rows]
            # d entropy / dx = -p (log p + entropy).
            of_entropy = _finite(all_logprobs).add_(entropies[rows, None]).mul_(probabilities)
            grad -= of_entropy.mul_(grad_entropies[rows, None] / shard.temperature)
        else:
            grad = all_logprobs.exp_().mul_(grad_all[rows])
        out[rows, : chunk.shape[1]] = grad.scatter_add_(1, columns[rows, None], grad_target[rows])
    return out


def _local_statistics(logits: Tensor, columns: Tensor, owned: Tensor, shard: Shard, want_entropy: bool) -> Tensor:
    """Compute this rank's contribution to each row: [3, rows] fp32, with entropy [4, rows].

    Rows: the largest logit and the log of the sum of ``exp(logit - largest)``, both -inf without columns; the target's
    logit, 0 if another rank holds it; the mean of ``logit - largest`` under the softmax over the columns. On CUDA
    `logprob_kernels.local_statistics` per chunk of columns, combined by `finished`.
    """
    if runs_kernels(logits):
        from megatron_rl.algorithms.logprob_kernels import local_statistics

        real = shard.columns(logits.shape[1])
        return local_statistics(logits, columns, owned, real, shard.temperature, want_entropy)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    statistics = logits.new_zeros((4 if want_entropy else 3, logits.shape[0]), dtype=dtype)
    statistics[:2] = -torch.inf
    largest, log_sum, target_logits = statistics[:3]
    for rows, chunk in shard.chunks(logits):
        chosen = chunk.gather(1, columns[rows, None])[:, 0]
        target_logits[rows] = torch.where(owned[rows], chosen, 0.0)
        largest[rows] = chunk.amax(dim=1)
        shifted = chunk.sub_(largest[rows, None])
        powers = shifted.exp()
        total = powers.sum(dim=1)
        log_sum[rows] = total.log()
        if want_entropy:
            statistics[3, rows] = powers.mul_(_finite(shifted)).sum(dim=1) / total
    return statistics


def _combine(local: Tensor, shard: Shard, want_entropy: bool) -> list[Tensor]:
    """Return log-probs, largest logits, log sums and optionally entropies over the whole vocabulary: [T] each."""
    if runs_kernels(local):
        from megatron_rl.algorithms.logprob_kernels import finished

        every = [local]
        if shard.tensor_group is not None:
            every = [torch.empty_like(local) for _ in range(shard.tensor_group.size())]
            dist.all_gather(every, local, group=shard.tensor_group)  # in the order of the ranks
        return finished(torch.stack(every), shard.temperature, want_entropy)
    largest, log_sum, target_logits, *means = local.unbind()
    if shard.tensor_group is not None:  # two all-reduces of a few [T]
        own_largest, own_log_sum = largest, log_sum
        # Subtract the largest logit of all ranks before exp, so that no rank overflows.
        largest = own_largest.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=shard.tensor_group)
        below = torch.where(own_largest > -torch.inf, own_largest - largest, -torch.inf)
        share = (below + own_log_sum).exp()
        totals = torch.stack([share, target_logits, *(share * (mean + _finite(below.clone())) for mean in means)])
        dist.all_reduce(totals, group=shard.tensor_group)
        total_share, target_logits, *means = totals.unbind()
        log_sum, means = total_share.log(), [mean / total_share for mean in means]
    # (x - max) - log sum exp(x - max), not x - log Z: at logits of 20 one ulp is 2e-6, which would be the error of
    # every log-prob. Entropy: -sum p log p = log sum - sum p (x - max).
    return [(target_logits - largest) - log_sum, largest, log_sum, *(log_sum - mean for mean in means)]


def _finite(values: Tensor) -> Tensor:
    """Clamp -inf in ``values`` to a finite floor, in place: the probability is 0, and 0 * -inf would be NaN."""
    return values.clamp_min_(torch.finfo(values.dtype).min / 2)
