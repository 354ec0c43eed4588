"""Truncated importance sampling, token by token (https://fengyao.notion.site/off-policy-rl)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithms import CLIPPED, Extension, LossInputs, Terms, log_ratio, option


@dataclass(frozen=True, kw_only=True)
class Correction(Extension):
    """``min(pi_old / pi_inference, cap)``."""

    cap: float = option(2.0, gt=0)
    """The largest weight."""

    def __call__(self, batch: LossInputs) -> Terms:
        ratio = self.ratio(batch)
        weights = torch.where(batch.in_loss, ratio.clamp_max(self.cap), 0.0)
        return weights, {CLIPPED: batch.in_loss & (ratio > self.cap)}

    def ratio(self, batch: LossInputs) -> Tensor:
        """Return the ratio of each token, [T] fp32; arbitrary at masked positions."""
        return log_ratio(batch.old_logprobs, batch.inference_logprobs, batch.loss_mask).exp()
