"""The clipped policy loss of PPO and GRPO with the ratio of each token (arXiv 1707.06347, 2402.03300)."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.interfaces import LossConfig, PolicyLoss
from megatron_rl.algorithms.ratios import log_ratio
from megatron_rl.algorithms.surrogate import clipped_surrogate


def compute(
    current_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    sequence_index: Tensor,
    num_sequences: int,
    config: LossConfig,
) -> PolicyLoss:
    """``clipped_surrogate`` of ``rho = pi_current / pi_old`` at each token.

    Args and result as in ``interfaces.LossFunction``; not reduced, so it has no denominator of its own.
    """
    del sequence_index, num_sequences  # tokens are independent; the signature is that of every loss
    ratio = log_ratio(current_logprobs, old_logprobs, loss_mask).exp()
    return clipped_surrogate(ratio, advantages, loss_mask, config)
