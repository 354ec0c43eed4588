"""Veto: one token that the trainer holds for all but impossible rejects its sequence.

Source: verl (2025), `rollout_token_veto_threshold`, there also 1e-4.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.algorithms import CLIPPED, Extension, LossInputs, Terms, log_ratio, option


@dataclass(frozen=True, kw_only=True)
class Correction(Extension):
    """1, and 0 for sequences with a loss token of ``pi_old / pi_inference < veto``.

    It guards against broken tokens and does not weigh: compose it, as in ``token_tis+veto``. Other sequences of the
    same sample stay.
    """

    LEVEL = "sequence"

    veto: float = option(1e-4, ge=1e-8, lt=1)
    """One smaller ratio rejects its sequence. Ratios are told apart down to 2e-9."""

    def __call__(self, batch: LossInputs) -> Terms:
        ratio = log_ratio(batch.old_logprobs, batch.inference_logprobs, batch.loss_mask).exp()
        vetoes = batch.sequence_sums((ratio < self.veto).float())
        rejected = batch.in_loss & (vetoes > 0)[batch.sequence_index]
        return (batch.in_loss & ~rejected).float(), {CLIPPED: rejected}
