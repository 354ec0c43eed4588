"""Veto: one token that is almost impossible for the trainer rejects its sequence.

Source: verl (2025), `rollout_token_veto_threshold`, also 1e-4 there.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.algorithms import CLIPPED, Extension, LossInputs, Terms, log_ratio, option


@dataclass(frozen=True, kw_only=True)
class Correction(Extension):
    """0 for sequences with a loss token of ``pi_old / pi_inference < veto``, else 1.

    It guards against broken tokens and does not weight: combine it, as in ``token_tis+veto``. Other sequences of the
    same sample are kept.
    """

    LEVEL = "sequence"

    veto: float = option(1e-4, ge=1e-8, lt=1)
    """A smaller ratio rejects the sequence. Ratios are distinguished down to 2e-9."""

    def __call__(self, batch: LossInputs) -> Terms:
        ratio = log_ratio(batch.old_logprobs, batch.inference_logprobs, batch.loss_mask).exp()
        vetoes = batch.sequence_sums((ratio < self.veto).float())
        rejected = batch.in_loss & (vetoes > 0)[batch.sequence_index]
        return (batch.in_loss & ~rejected).float(), {CLIPPED: rejected}
