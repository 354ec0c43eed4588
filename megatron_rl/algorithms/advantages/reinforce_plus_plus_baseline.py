"""REINFORCE++ with baseline: reward minus its group's mean, normalised over the step's tokens (arXiv 2501.03262)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.algorithms import Extension, Terms, TokenBatch, option
from megatron_rl.algorithms.groups import group_statistics, normalised


@dataclass(frozen=True, kw_only=True)
class Advantage(Extension):
    """``(c - mean) / (std + epsilon)`` of ``c = r - group mean``; mean and std as in ``reinforce_plus_plus``.

    One standard deviation for all groups: one that is nearly always or nearly never solved is not blown up, as it is by
    its own. The mean of ``c`` is 0 over samples, not over tokens where right and wrong answers differ in length. Both
    are of the samples that are trained on, so groups without a signal are in them only where they are kept.
    """

    epsilon: float = option(1e-6, gt=0)
    """Added to the standard deviation, in units of reward."""

    def __call__(self, batch: TokenBatch) -> Terms:
        """0 of samples that are not trained on."""
        step = batch.step
        centred = group_statistics(step).centred
        return batch.of_samples(normalised(centred, step.in_loss * step.loss_tokens, self.epsilon)), {}
