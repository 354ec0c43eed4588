"""Estimators of ``KL(current || reference)`` from the log-probs of tokens the current policy sampled.

Source: John Schulman, "Approximating KL Divergence", 2020, http://joschu.net/blog/kl-approx.html. With
``d = log pi_current(token) - log pi_ref(token)``, positive on average::

    k1 = d                     unbiased, high variance, negative for about half of the tokens
    k2 = d^2 / 2               biased, low variance, never negative
    k3 = exp(-d) - 1 + d       unbiased, low variance, never negative

The gradient of an estimator need not estimate the gradient. In expectation over tokens of the current policy:

* k1: ``E[grad d] = E[grad log pi] = 0``. It regularises nothing; k1 belongs into the reward.
* k2: ``E[d grad log pi]`` is the exact gradient of ``KL(current || reference)``.
* k3, of the GRPO paper: ``E[(1 - exp(-d)) grad log pi]`` is the gradient of ``KL(reference || current)``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from megatron_rl.algorithms.batch import TokenBatch, log_ratio, trusted_mask

Estimator = Literal["k1", "k2", "k3"]


def kl_per_token(kind: Estimator, current_logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Estimate the KL of each token in nats: [T] fp32, 0 at masked positions, which may hold anything.

    All arguments are [T]; the gradient flows into ``current_logprobs``. ``d`` is bounded by ``batch.LOG_RATIO_LIMIT``.
    """
    difference = log_ratio(current_logprobs, ref_logprobs, loss_mask)
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    # expm1: near d = 0, where training lives, exp(-d) - 1 keeps no digits of the d^2 / 2 that matters.
    return torch.expm1(-difference) + difference


def with_kl_in_reward(batch: TokenBatch, beta: float) -> tuple[TokenBatch, dict[str, Tensor]]:
    """Take ``beta (log pi_old - log pi_ref)`` off the reward of each loss token; returns the batch and a sum to log.

    k1, which is unbiased: the gradient comes from the advantages (arXiv 2203.02155).
    """
    mask = trusted_mask(batch.loss_mask, batch.old_logprobs, batch.ref_logprobs)
    kl = log_ratio(batch.old_logprobs, batch.ref_logprobs, mask)
    return replace(batch, rewards=batch.rewards - beta * kl), {"actor/reward_kl_penalty": kl}
