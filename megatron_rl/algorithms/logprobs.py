"""Log-probs of the tokens of a packed batch; the vocabulary may be split across a tensor-parallel group.

The logits at index t predict token t + 1; everywhere else token t's log-prob sits at index t. The shift
between the two happens in ``at_tokens`` and nowhere else. On ``P0 P1 A0 E``::

    logits at                  P0          P1          A0          E
    predict                    P1          A0          E           (nothing)
    result at index            1           2           3
    selected_logprobs      0   log p(P1)   log p(A0)   log p(E)

Neither the full logits of a group nor an fp32 copy of a shard ever exists: rows are worked through in chunks,
and the backward pass computes the softmax again from the saved logits instead of keeping it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rl.arithmetic import LOGITS_AT_ONCE
from megatron_rl.errors import ConfigError

CPU_CHUNK_ELEMENTS = 2**20
"""Logits worked on at a time on a CPU, where temporaries that leave the cache made the pass twice as slow."""

Entropy = Literal["none", "detached", "differentiable"]


@dataclass(frozen=True)
class SelectedLogprobs:
    """What the model says about each token of a packed batch, given the tokens before it."""

    logprobs: Tensor
    """[T] fp32, token t's at index t; 0 at the first token of every sequence, which nothing predicts."""
    entropy: Tensor | None
    """[T] fp32, nats, of the distribution token t was drawn from; 0 at first tokens. None: not asked for."""


def selected_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    position_ids: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    vocab_start: int = 0,
    tensor_group: dist.ProcessGroup | None = None,
    entropy: Entropy = "none",
) -> SelectedLogprobs:
    """fp32 log-softmax of ``logits / temperature`` at each sequence's own next token.

    All ranks of the tensor group call this with the same tokens and get the same result; the gradient of a
    rank is that of its shard, for a loss that every rank computes alike.

    Args:
        logits: [T, V / tp], any float type; this rank's columns, real ones followed by padding.
        token_ids: [T] int64.
        position_ids: [T] int64, 0 at the first token of every sequence (index 0 is one).
        vocab_size: the tokenizer's size; columns with an id beyond it are padding and have probability 0.
        temperature: of the distribution the tokens were sampled from.
        vocab_start: the id of the first column of this rank.
        tensor_group: the tensor-parallel ranks that hold the other columns; None when this rank holds all.
        entropy: whether to return it in the same pass, and whether a gradient flows through it.

    Returns:
        Both [T] fp32 (fp64 for fp64 logits). An id outside ``[0, vocab_size)`` has log-prob -inf.

    Raises:
        ConfigError: a temperature of 0 or less, or fewer columns than ``vocab_size`` without a tensor group.
    """
    check_arguments(logits.shape[1], vocab_size, temperature, tensor_group)
    shard = Shard(vocab_start, vocab_size, temperature, tensor_group)
    # roll pairs logits[t] with token_ids[t + 1] without the full-size copy that logits[:-1] costs in the
    # backward pass. The one wrong pair, the last logits with the first token, lands on index 0 and goes with
    # the first tokens.
    results = _TargetLogprobs.apply(logits, token_ids.roll(-1), shard, entropy)
    return at_tokens(*results, position_ids)


def at_tokens(at_logits: Tensor, entropy_at_logits: Tensor | None, position_ids: Tensor) -> SelectedLogprobs:
    """From what is known at the logits of t to what belongs to token t + 1: the shift, all [T]."""
    predicted = position_ids > 0
    return SelectedLogprobs(
        logprobs=torch.where(predicted, at_logits.roll(1), 0.0),
        entropy=None if entropy_at_logits is None else torch.where(predicted, entropy_at_logits.roll(1), 0.0),
    )


def check_arguments(
    columns: int, vocab_size: int, temperature: float, tensor_group: dist.ProcessGroup | None
) -> None:
    """``columns`` are this rank's, padding included.

    Raises:
        ConfigError: see `selected_logprobs`.
    """
    if not temperature > 0:
        raise ConfigError(
            [f"temperature is {temperature}: logits are divided by it; use a positive value, for example 1.0"]
        )
    if tensor_group is None and columns < vocab_size:
        raise ConfigError(
            [
                f"the logits have {columns} columns for a vocabulary of {vocab_size}: the others "
                "are on other ranks, or the vocabulary is another model's; pass the tensor group, or the "
                "model's own vocabulary size"
            ]
        )


@dataclass(frozen=True)
class Shard:
    """This rank's part of the vocabulary and the distribution over the whole of it."""

    vocab_start: int
    vocab_size: int
    temperature: float
    tensor_group: dist.ProcessGroup | None

    def columns(self, held: int) -> int:
        """How many of the ``held`` columns of this rank are real tokens; the rest is padding."""
        return max(0, min(self.vocab_size - self.vocab_start, held))

    def reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """``values`` combined over the tensor group, in place."""
        if self.tensor_group is not None:
            dist.all_reduce(values, operation, group=self.tensor_group)
        return values

    def chunks(self, logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Row ranges and their real logits, a view [rows, columns] of ``logits`` each."""
        columns = self.columns(logits.shape[1])
        elements = CPU_CHUNK_ELEMENTS if logits.device.type == "cpu" else LOGITS_AT_ONCE
        rows = max(1, elements // max(columns, 1))
        for start in range(0, logits.shape[0] if columns else 0, rows):
            part = slice(start, start + rows)
            yield part, logits[part, :columns]

    def tempered(self, chunk: Tensor) -> Tensor:
        """A fresh copy of ``chunk`` in fp32 or better, divided by the temperature."""
        copy = chunk.to(_accumulation(chunk), copy=True)
        return copy if self.temperature == 1.0 else copy.div_(self.temperature)


class _TargetLogprobs(torch.autograd.Function):
    """Log-prob of ``targets[t]`` and the entropy under ``logits[t]``: all [T], no shift."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, shard: Shard, entropy: Entropy
    ) -> tuple[Tensor, Tensor | None]:
        columns, owned = local_targets(logits.shape[1], targets, shard)
        local = local_statistics(logits, columns, owned, shard, entropy != "none")
        largest, log_sum, target_logits, mean_logits = combine(local, shard)
        logprobs = known_logprobs(targets, largest, log_sum, target_logits, shard)
        # Entropy is -sum p log p with log p = (x - max) - log sum, so log sum - sum p (x - max).
        entropies = None if mean_logits is None else log_sum - mean_logits

        ctx.shard, ctx.differentiable_entropy = shard, entropy == "differentiable"
        ctx.save_for_backward(logits, columns, owned, largest, log_sum, entropies)
        if entropies is not None and not ctx.differentiable_entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor | None
    ) -> tuple[Tensor, None, None, None]:
        logits, columns, owned, largest, log_sum, entropies = ctx.saved_tensors
        known = RowStatistics(columns, owned, largest, log_sum, entropies if ctx.differentiable_entropy else None)
        grad_logits = torch.empty_like(logits)
        return logits_gradient(logits, known, grad_logprobs, grad_entropies, ctx.shard, grad_logits), None, None, None


def known_logprobs(
    targets: Tensor, largest: Tensor, log_sum: Tensor, target_logits: Tensor, shard: Shard
) -> Tensor:
    """[T]: the targets' log-probs, -inf for an id outside the vocabulary."""
    known = (targets >= 0) & (targets < shard.vocab_size)
    # (x - max) - log sum exp(x - max), never x - log Z: at logits of 20 one ulp is 2e-6, and the two
    # rounded terms would leave that error in every log-prob.
    return torch.where(known, (target_logits - largest) - log_sum, -torch.inf)


@dataclass(frozen=True)
class RowStatistics:
    """What the backward pass knows of each row besides its logits; all [T]."""

    columns: Tensor
    """int64, the target's column; see `local_targets`."""
    owned: Tensor
    largest: Tensor
    log_sum: Tensor
    entropies: Tensor | None
    """None where no gradient flows through the entropy."""

    def of(self, rows: slice) -> RowStatistics:
        """The same of some rows."""
        entropies = None if self.entropies is None else self.entropies[rows]
        return RowStatistics(self.columns[rows], self.owned[rows], self.largest[rows], self.log_sum[rows], entropies)


def logits_gradient(
    logits: Tensor,
    known: RowStatistics,
    grad_logprobs: Tensor,
    grad_entropies: Tensor | None,
    shard: Shard,
    out: Tensor,
) -> Tensor:
    """Gradient of ``logits`` [T, V / tp], written into ``out``, which may be ``logits`` itself."""
    out[:, shard.columns(logits.shape[1]) :] = 0
    # With x = logits / temperature: d log p(target) / dx = [v is target] - p.
    grad_all = -grad_logprobs[:, None] / shard.temperature
    grad_target = torch.where(known.owned[:, None], -grad_all, 0.0)
    for rows, chunk in shard.chunks(logits):
        row = known.of(rows)
        all_logprobs = shard.tempered(chunk).sub_(row.largest[:, None]).sub_(row.log_sum[:, None])
        if row.entropies is not None:
            probabilities = all_logprobs.exp()
            grad = probabilities * grad_all[rows]
            # d entropy / dx = -p (log p + entropy).
            surplus = _finite(all_logprobs).add_(row.entropies[:, None]).mul_(probabilities)
            grad -= surplus.mul_(grad_entropies[rows, None] / shard.temperature)
        else:
            grad = all_logprobs.exp_().mul_(grad_all[rows])
        out[rows, : chunk.shape[1]] = grad.scatter_add_(1, row.columns[:, None], grad_target[rows])
    return out


@dataclass(frozen=True)
class LocalStatistics:
    """What this rank's columns contribute to each row; all [T] fp32."""

    largest: Tensor
    """Largest logit; -inf when there are no columns."""
    log_sum: Tensor
    """Log of the sum of ``exp(logit - largest)``; -inf when there are no columns."""
    target_logits: Tensor
    """0 where another rank holds the target."""
    mean_logits: Tensor | None
    """Mean of ``logit - largest`` under the softmax over the local columns, for the entropy."""

    @classmethod
    def cat(cls, parts: Sequence[LocalStatistics]) -> LocalStatistics:
        """Of all rows, from those of ranges of rows."""
        return cls(
            torch.cat([part.largest for part in parts]),
            torch.cat([part.log_sum for part in parts]),
            torch.cat([part.target_logits for part in parts]),
            None if parts[0].mean_logits is None else torch.cat([part.mean_logits for part in parts]),
        )


def local_targets(held: int, targets: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
    """Column of each target ([T] int64, 0 where not here) and whether it is here ([T] bool); of ``held`` columns."""
    local = targets - shard.vocab_start
    owned = (local >= 0) & (local < shard.columns(held))
    return torch.where(owned, local, 0), owned


def local_statistics(
    logits: Tensor, columns: Tensor, owned: Tensor, shard: Shard, want_entropy: bool
) -> LocalStatistics:
    """``columns`` and ``owned`` are those of `local_targets`."""
    count, dtype = logits.shape[0], _accumulation(logits)
    largest = logits.new_full((count,), -torch.inf, dtype=dtype)
    log_sum = logits.new_full((count,), -torch.inf, dtype=dtype)
    target_logits = logits.new_zeros(count, dtype=dtype)
    mean_logits = logits.new_zeros(count, dtype=dtype) if want_entropy else None
    if not shard.columns(logits.shape[1]):
        return LocalStatistics(largest, log_sum, target_logits, mean_logits)

    for rows, raw in shard.chunks(logits):
        chunk = shard.tempered(raw)
        chosen = chunk.gather(1, columns[rows, None])[:, 0]
        target_logits[rows] = torch.where(owned[rows], chosen, 0.0)
        largest[rows] = chunk.amax(dim=1)
        shifted = chunk.sub_(largest[rows, None])
        powers = shifted.exp()
        total = powers.sum(dim=1)
        log_sum[rows] = total.log()
        if mean_logits is not None:
            mean_logits[rows] = powers.mul_(_finite(shifted)).sum(dim=1) / total
    return LocalStatistics(largest, log_sum, target_logits, mean_logits)


def combine(local: LocalStatistics, shard: Shard) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The four statistics over the whole vocabulary: two all-reduces of a few [T]."""
    if shard.tensor_group is None:
        return local.largest, local.log_sum, local.target_logits, local.mean_logits
    # The largest logit of all ranks is what is subtracted before exp, so that no rank overflows.
    largest = shard.reduce(local.largest.clone(), dist.ReduceOp.MAX)
    below = torch.where(local.largest > -torch.inf, local.largest - largest, -torch.inf)
    share = (below + local.log_sum).exp()
    rows = [share, local.target_logits]
    if local.mean_logits is not None:
        rows.append(share * (local.mean_logits + _finite(below.clone())))
    total_share, target_logits, *mean_shares = shard.reduce(torch.stack(rows), dist.ReduceOp.SUM).unbind()
    mean_logits = mean_shares[0] / total_share if mean_shares else None
    return largest, total_share.log(), target_logits, mean_logits


def _finite(values: Tensor) -> Tensor:
    """``values`` with -inf raised to a finite floor, in place: its probability is 0, but 0 * -inf is NaN."""
    return values.clamp_min_(torch.finfo(values.dtype).min / 2)


def _accumulation(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)
