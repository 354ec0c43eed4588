"""Geometric rejection: sequences on which trainer and engine disagree on average are left out.

Source: https://richardli.xyz/rl-collapse-3; the mean log ratio of a sequence is GSPO's (arXiv 2507.18071).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.algorithms import CLIPPED, Extension, LossInputs, Terms, log_ratio, option


@dataclass(frozen=True, kw_only=True)
class Correction(Extension):
    """1 for sequences whose ``exp(mean log ratio over loss tokens)`` lies in ``[lower, upper]``, else 0.

    It rejects and does not weigh: compose it with ``token_tis`` to do both. The mean over a sequence varies far less
    than the ratios of its tokens, so the default range is narrow. Each sequence of a sample is judged for itself.
    """

    LEVEL = "sequence"

    lower: float = option(0.99, ge=0, lt=1)
    """Sequences of a smaller ratio are rejected; where trainer and engine agree it is 1, which must be accepted."""
    upper: float = option(1.01, gt=1)
    """Sequences of a larger ratio are rejected."""

    def __call__(self, batch: LossInputs) -> Terms:
        log_ratios = log_ratio(batch.old_logprobs, batch.inference_logprobs, batch.loss_mask)
        ratio = batch.sequence_means(log_ratios).exp()
        rejected = batch.in_loss & ((ratio < self.lower) | (ratio > self.upper))[batch.sequence_index]
        return (batch.in_loss & ~rejected).float(), {CLIPPED: rejected}
