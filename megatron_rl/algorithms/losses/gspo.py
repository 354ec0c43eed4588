"""GSPO: the clipped policy loss with one ratio for the whole sequence (arXiv 2507.18071)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.algorithms import LossInputs, Terms, log_ratio, option
from megatron_rl.algorithms.losses import clip


@dataclass(frozen=True, kw_only=True)
class Loss(clip.Loss):
    """``clipped_surrogate`` of ``s = exp(mean of log rho over the sequence's loss tokens)``.

    Each token's ratio has the value ``s`` and the gradient ``s * grad log pi`` of that token alone
    (GSPO-token there, whose tokens may have advantages of their own); with equal ones and reduced with
    ``sequence-mean`` this is the gradient of the sequence-level objective.
    The ratio is a geometric mean: the paper's clip range, the default, is three orders of magnitude below that of
    token ratios. The clip counts are of tokens in clipped sequences.

    Of a sample of several sequences each has a ratio of its own: it is the probability of what was drawn after one
    prompt, whatever else the harness tried. Its weight is its share of the sample's tokens.
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
