"""REINFORCE++ with baseline: reward minus its group's mean, normalised over the step's tokens (arXiv 2501.03262)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.algorithms import Extension, Terms, TokenBatch, option
from megatron_rl.algorithms.groups import group_statistics, normalised


@dataclass(frozen=True, kw_only=True)
class Advantage(Extension):
    """``(c - mean) / (std + epsilon)`` of ``c = r - group mean``; mean and std as in ``reinforce_plus_plus``.

    A common standard deviation does not amplify groups that are almost always or almost never solved. The mean of ``c``
    over tokens is not 0 if right and wrong answers differ in length. Both are over trained samples, so groups without
    signal are included only if kept.
    """

    epsilon: float = option(1e-6, gt=0)
    """Added to the standard deviation, in units of reward."""

    def __call__(self, batch: TokenBatch) -> Terms:
        """Samples that are not trained on get 0."""
        step = batch.step
        centred = group_statistics(step).centred
        return batch.of_samples(normalised(centred, step.in_loss * step.loss_tokens, self.epsilon)), {}
