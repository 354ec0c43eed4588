"""Masked importance sampling: masks tokens on which trainer and engine disagree too much."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_rl.algorithms import CLIPPED, Extension, LossInputs, Terms, log_ratio, option


@dataclass(frozen=True, kw_only=True)
class Correction(Extension):
    """``pi_old / pi_inference`` inside ``[lower, upper]``, 0 outside.

    A quantised rollout has a mean gap of about 0.02 nats: only outliers are outside the default range.
    """

    lower: float = option(0.5, ge=0, lt=1)
    """Smaller ratios are rejected; must accept 1, where trainer and engine agree."""
    upper: float = option(2.0, gt=1)
    """Larger ratios are rejected."""

    def __call__(self, batch: LossInputs) -> Terms:
        ratio = log_ratio(batch.old_logprobs, batch.inference_logprobs, batch.loss_mask).exp()
        rejected = batch.in_loss & ((ratio < self.lower) | (ratio > self.upper))
        return torch.where(batch.in_loss & ~rejected, ratio, 0.0), {CLIPPED: rejected}
