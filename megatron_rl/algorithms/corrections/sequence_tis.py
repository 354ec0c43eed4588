"""Truncated importance sampling with the ratio of the whole sequence (https://richardli.xyz/rl-collapse)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_rl.algorithms import CLIPPED, Extension, Terms, TokenBatch, log_ratio, option


@dataclass(frozen=True, kw_only=True)
class Correction(Extension):
    """``min(exp(sum of log ratios over the sequence's loss tokens), cap)``, at each of its loss tokens.

    Unbiased but for the cap, at a variance that grows exponentially with the length: noise of 0.1 nats a
    token is 6 nats after 4096 tokens.
    """

    LEVEL = "sequence"

    cap: float = option(2.0, gt=0)
    """The largest weight. A sum of ratios that overflows exp is held at it, too."""

    def __call__(self, batch: TokenBatch) -> Terms:
        """See ``Extension``."""
        sums = batch.sequence_sums(log_ratio(batch.old_logprobs, batch.inference_logprobs, batch.loss_mask))
        ratio = sums.exp().float()[batch.sequence_index]
        weights = torch.where(batch.in_loss, ratio.clamp_max(self.cap), 0.0)
        return weights, {CLIPPED: batch.in_loss & (ratio > self.cap)}
