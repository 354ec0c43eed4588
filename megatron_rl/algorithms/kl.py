"""Estimators of ``KL(current || reference)`` from the log-probs of tokens sampled by the current policy.

Source: John Schulman, "Approximating KL Divergence", 2020, http://joschu.net/blog/kl-approx.html. With ``d = log
pi_current(token) - log pi_ref(token)``, positive on average::

    k1 = d                     unbiased, high variance, negative for about half of the tokens
    k2 = d^2 / 2               biased, low variance, never negative
    k3 = exp(-d) - 1 + d       unbiased, low variance, never negative

An estimator's gradient need not estimate the KL's gradient. In expectation over tokens of the current policy:

    k1    ``E[grad d] = E[grad log pi] = 0``: it does not regularise; use k1 in the reward
    k2    ``E[d grad log pi]``, the exact gradient of ``KL(current || reference)``
    k3    ``E[(1 - exp(-d)) grad log pi]``, the gradient of ``KL(reference || current)`` (GRPO paper)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from megatron_rl.algorithms.batch import TokenBatch, log_ratio, trusted_mask

Estimator = Literal["k1", "k2", "k3"]


def kl_per_token(kind: Estimator, current_logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Estimate the KL of each token in nats: [T] fp32, 0 at masked positions (whose inputs are arbitrary).

    All arguments are [T]; the gradient flows into ``current_logprobs``. ``d`` is clamped to ``batch.LOG_RATIO_LIMIT``.
    """
    difference = log_ratio(current_logprobs, ref_logprobs, loss_mask)
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    # expm1: near d = 0 exp(-d) - 1 would lose all digits of d^2 / 2.
    return torch.expm1(-difference) + difference


def with_kl_in_reward(batch: TokenBatch, beta: float) -> tuple[TokenBatch, dict[str, Tensor]]:
    """Subtract ``beta (log pi_old - log pi_ref)`` from the reward of each loss token; return the batch and a sum to
    log.

    Uses k1, which is unbiased: the gradient comes from the advantages (arXiv 2203.02155).
    """
    mask = trusted_mask(batch.loss_mask, batch.old_logprobs, batch.ref_logprobs)
    kl = log_ratio(batch.old_logprobs, batch.ref_logprobs, mask)
    return replace(batch, rewards=batch.rewards - beta * kl), {"actor/reward_kl_penalty": kl}
