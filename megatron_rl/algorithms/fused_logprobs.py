"""Log-probs of the tokens of a packed batch straight from hidden states: the logits of a batch never exist.

The output layer's product is made a few rows at a time and forgotten; the backward pass makes it again. That
costs one product more (four for three), and saves logits and their gradient, [T, V / tp] each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rl.algorithms.logprobs import (
    Entropy,
    LocalStatistics,
    RowStatistics,
    SelectedLogprobs,
    Shard,
    at_tokens,
    check_arguments,
    combine,
    known_logprobs,
    local_statistics,
    local_targets,
    logits_gradient,
)

PRODUCT_ELEMENTS = 2**27
"""Logits made at a time: 256 MiB in bf16, 880 rows of a vocabulary of 152,000. Not tuned."""
CPU_PRODUCT_ELEMENTS = 2**24
"""The same on a CPU: 64 MiB in fp32. Not tuned."""
FEWEST_ROWS = 64
"""Of a product, however large the vocabulary: fewer would read the whole weight for next to nothing."""


def projected_logprobs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    position_ids: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    vocab_start: int = 0,
    tensor_group: dist.ProcessGroup | None = None,
    entropy: Entropy = "none",
) -> SelectedLogprobs:
    """`selected_logprobs` of the logits ``hidden @ weight.T``.

    Args:
        hidden: [T, H]; its gradient is of this rank's columns, to be added up over the tensor group.
        weight: [V / tp, H]; this rank's rows, real ones followed by padding.
        token_ids: see `selected_logprobs`, as the rest.
        position_ids: ditto.
        vocab_size: ditto.
        temperature: ditto.
        vocab_start: ditto.
        tensor_group: ditto.
        entropy: ditto.

    Raises:
        ConfigError: as `selected_logprobs`.
    """
    check_arguments(weight.shape[0], vocab_size, temperature, tensor_group)
    shard = Shard(vocab_start, vocab_size, temperature, tensor_group)
    results = _ProjectedLogprobs.apply(hidden, weight, token_ids.roll(-1), shard, entropy)
    return at_tokens(*results, position_ids)


class _ProjectedLogprobs(torch.autograd.Function):
    """Log-prob of ``targets[t]`` and the entropy at ``hidden[t]``: all [T], no shift."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, shard: Shard, entropy: Entropy
    ) -> tuple[Tensor, Tensor | None]:
        columns, owned = local_targets(weight.shape[0], targets, shard)
        parts = [
            local_statistics(logits, columns[rows], owned[rows], shard, entropy != "none")
            for rows, logits in _products(hidden, weight)
        ]
        largest, log_sum, target_logits, mean_logits = combine(LocalStatistics.cat(parts), shard)
        logprobs = known_logprobs(targets, largest, log_sum, target_logits, shard)
        entropies = None if mean_logits is None else log_sum - mean_logits
        ctx.shard, ctx.differentiable_entropy = shard, entropy == "differentiable"
        ctx.save_for_backward(hidden, weight, columns, owned, largest, log_sum, entropies)
        if entropies is not None and not ctx.differentiable_entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor | None
    ) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, weight, columns, owned, largest, log_sum, entropies = ctx.saved_tensors
        shard: Shard = ctx.shard
        known = RowStatistics(columns, owned, largest, log_sum, entropies if ctx.differentiable_entropy else None)
        grad_hidden = torch.empty_like(hidden)
        # fp32: a sum of many products rounded to bf16 each time drifts.
        grad_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for rows, logits in _products(hidden, weight):
            grad_entropy = None if grad_entropies is None else grad_entropies[rows]
            grad = logits_gradient(logits, known.of(rows), grad_logprobs[rows], grad_entropy, shard, out=logits)
            torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight.dtype == grad.dtype:
                grad_weight.addmm_(grad.t(), hidden[rows])
            else:
                grad_weight += grad.t() @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _products(hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Row ranges and their logits [rows, V / tp], in the dtype of the model; one at a time in memory."""
    elements = CPU_PRODUCT_ELEMENTS if hidden.device.type == "cpu" else PRODUCT_ELEMENTS
    size = max(FEWEST_ROWS, elements // weight.shape[0])
    for start in range(0, hidden.shape[0], size):
        rows = slice(start, start + size)
        yield rows, hidden[rows] @ weight.t()
