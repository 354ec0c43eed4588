"""GSPO: the clipped policy loss with one ratio for the whole sequence (arXiv 2507.18071)."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.aggregation import sequence_means
from megatron_rl.algorithms.interfaces import LossConfig, PolicyLoss
from megatron_rl.algorithms.ratios import log_ratio
from megatron_rl.algorithms.surrogate import clipped_surrogate

DEFAULT_CLAMP = (3e-4, 4e-4)
DEFAULT_AGGREGATION = "sequence-mean"


def compute(
    current_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    sequence_index: Tensor,
    num_sequences: int,
    config: LossConfig,
) -> PolicyLoss:
    """``clipped_surrogate`` of ``s = exp(mean of log rho over the sequence's loss tokens)``.

    Each token's ratio has the value ``s`` and the gradient ``s * grad log pi`` of that token alone
    (GSPO-token there); reduced with ``sequence-mean`` this is the gradient of the sequence-level objective.
    The ratio is a geometric mean: the paper's clip range, the default, is three orders of magnitude below that of
    token ratios.

    Args and result as in ``interfaces.LossFunction``; the clip counts are of tokens in clipped sequences.
    """
    token_log_ratio = log_ratio(current_logprobs, old_logprobs, loss_mask)
    means = sequence_means(token_log_ratio.detach(), loss_mask, sequence_index, num_sequences)
    # token_log_ratio - its detached self is 0 and carries the token's gradient.
    ratio = (means[sequence_index] + token_log_ratio - token_log_ratio.detach()).exp()
    return clipped_surrogate(ratio, advantages, loss_mask, config)
