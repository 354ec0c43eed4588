"""REINFORCE++: reward normalised over the tokens of the whole step (arXiv 2501.03262).

The paper's KL penalty is part of the reward; here it is a term of the loss, ``--grpo-kl-beta``.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.algorithms import Extension, Terms, TokenBatch, option
from megatron_rl.algorithms.groups import normalised


@dataclass(frozen=True, kw_only=True)
class Advantage(Extension):
    """``(r - mean) / (std + epsilon)`` over all loss tokens of the step, on all ranks; std with ddof 1.

    Each sample counts once per token; in ``batch_norm`` once.
    """

    BASELINE = "batch"

    epsilon: float = option(1e-6, gt=0)
    """Added to the standard deviation, in units of reward."""

    def __call__(self, batch: TokenBatch) -> Terms:
        """Samples that are not trained on get 0."""
        step = batch.step
        return batch.of_samples(normalised(step.rewards, step.in_loss * step.loss_tokens, self.epsilon)), {}
