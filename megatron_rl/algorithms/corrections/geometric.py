"""Geometric rejection: masks sequences on which trainer and engine disagree on average.

Source: https://richardli.xyz/rl-collapse-3; the mean log ratio of a sequence is GSPO's (arXiv 2507.18071).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.algorithms import CLIPPED, Extension, LossInputs, Terms, log_ratio, option


@dataclass(frozen=True, kw_only=True)
class Correction(Extension):
    """1 for sequences whose ``exp(mean log ratio over loss tokens)`` lies in ``[lower, upper]``, else 0.

    It only rejects: combine it with ``token_tis`` to weight as well. A sequence's mean varies much less than its
    tokens' ratios, so the default range is narrow. Each sequence of a sample is judged separately.
    """

    LEVEL = "sequence"

    lower: float = option(0.99, ge=0, lt=1)
    """Sequences with a smaller ratio are rejected; must accept 1, where trainer and engine agree."""
    upper: float = option(1.01, gt=1)
    """Sequences with a larger ratio are rejected."""

    def __call__(self, batch: LossInputs) -> Terms:
        log_ratios = log_ratio(batch.old_logprobs, batch.inference_logprobs, batch.loss_mask)
        ratio = batch.sequence_means(log_ratios).exp()
        rejected = batch.in_loss & ((ratio < self.lower) | (ratio > self.upper))[batch.sequence_index]
        return (batch.in_loss & ~rejected).float(), {CLIPPED: rejected}
