"""SAPO: a smooth gate on the ratio of each token instead of a clip (arXiv 2511.20347)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_rl.algorithms import Extension, LossInputs, Terms, log_ratio, option


@dataclass(frozen=True, kw_only=True)
class Loss(Extension):
    """``-4 / tau sigmoid(tau (rho - 1)) A``, with ``tau_pos`` where A > 0 and ``tau_neg`` elsewhere.

    The gradient is that of ``-rho A`` times ``4 p (1 - p)``, p being the sigmoid: 1 at rho = 1, smaller on both sides.
    """

    AGGREGATION = "sequence-mean"

    tau_pos: float = option(1.0, gt=0)
    """Temperature for positive advantages; larger ones reduce the gradient earlier."""
    tau_neg: float = option(1.05, gt=0)
    """Temperature for others; larger in the paper, because pushing a token down affects all others."""

    def __call__(self, batch: LossInputs) -> Terms:
        in_loss, advantages = batch.in_loss, batch.advantages
        ratio = log_ratio(batch.current_logprobs, batch.old_logprobs, batch.loss_mask).exp()
        tau = torch.where(advantages > 0, self.tau_pos, self.tau_neg)
        share = torch.sigmoid(tau * (ratio - 1))
        loss = torch.where(in_loss, -4 / tau * share * advantages, 0.0)
        return loss, {"actor/gate": torch.where(in_loss, 4 * share * (1 - share), 0.0)}
