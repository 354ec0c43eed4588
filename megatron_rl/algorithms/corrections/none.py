"""No correction: every token has the weight 1, and what the mismatch does to the gradient stays."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.algorithms import Extension, LossInputs, Terms


@dataclass(frozen=True, kw_only=True)
class Correction(Extension):
    """1 at loss tokens."""

    def __call__(self, batch: LossInputs) -> Terms:
        return batch.in_loss.float(), {}
