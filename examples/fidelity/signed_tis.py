"""`token_tis`, with metrics of what its cap does to tokens of positive and of negative advantage.

``--rl-correction examples/fidelity/signed_tis.py:Signed`` trains as ``token_tis`` does. Each metric is per loss token,
so ``cap/positive_weight`` over ``cap/positive`` is the mean weight of the tokens with positive advantage.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_rl.algorithms import CLIPPED, LossInputs, Terms
from megatron_rl.algorithms.corrections import token_tis


@dataclass(frozen=True, kw_only=True)
class Signed(token_tis.Correction):
    """``min(pi_old / pi_inference, cap)`` with its share, weight and uncapped ratio by sign of the advantage."""

    def __call__(self, batch: LossInputs) -> Terms:
        weights, marks = super().__call__(batch)
        ratio = self.ratio(batch)
        for sign, chosen in (("positive", batch.advantages > 0), ("negative", batch.advantages < 0)):
            chosen = chosen & batch.in_loss
            marks[f"cap/{sign}"] = chosen
            marks[f"cap/{sign}_capped"] = chosen & marks[CLIPPED]
            marks[f"cap/{sign}_weight"] = torch.where(chosen, weights, 0.0)
            marks[f"cap/{sign}_ratio"] = torch.where(chosen, ratio, 0.0)
        return weights, marks
