"""GSPO: the clipped policy loss with one ratio for the whole sequence (arXiv 2507.18071)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.algorithms import LossInputs, Terms, log_ratio, option
from megatron_rl.algorithms.losses import clip


@dataclass(frozen=True, kw_only=True)
class Loss(clip.Loss):
    """``clipped_surrogate`` of ``s = exp(mean of log rho over the sequence's loss tokens)``.

    Each token's ratio has the value ``s`` and the gradient ``s * grad log pi`` of that token alone (the paper's
    GSPO-token); with one advantage per sequence and ``sequence-mean`` this is the gradient of the sequence-level
    objective. The ratio is a geometric mean, so the paper's clip range, the default, is three orders of magnitude
    smaller than for token ratios. Clip counts are of tokens in clipped sequences.

    Each sequence of a sample has its own ratio: the probability of what was drawn after one prompt. Its weight is its
    share of the sample's tokens.
    """

    AGGREGATION = "sequence-mean"

    clamp_eps_lower: float = option(3e-4, gt=0, le=1)
    clamp_eps_upper: float = option(4e-4, gt=0)

    def __call__(self, batch: LossInputs) -> Terms:
        token_log_ratio = log_ratio(batch.current_logprobs, batch.old_logprobs, batch.loss_mask)
        means = batch.sequence_means(token_log_ratio.detach())
        # token_log_ratio - its detached self is 0 and carries the token's gradient.
        ratio = (means[batch.sequence_index] + token_log_ratio - token_log_ratio.detach()).exp()
        return self.clipped_surrogate(ratio, batch)
