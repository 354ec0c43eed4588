"""The policy-gradient objective of one micro-batch, and its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.algorithms.batch import Aggregation, TokenBatch, summed, token_weights, trusted_mask
from megatron_rl.algorithms.extension import CLIPPED, Function, correction_of, loss_of
from megatron_rl.algorithms.kl import Estimator, kl_per_token
from megatron_rl.algorithms.mismatch import mismatch_metrics, mismatch_sums
from megatron_rl.config.rl_config import RLConfig

MicroLoss = tuple[Tensor, Tensor, dict[str, Tensor]]
"""A micro-batch's part of ``sum(totals) / sum(denominators)``: its total, [] fp32 with gradient; its denominator, []
integer; detached sums for metrics, on the device.
"""


@dataclass(frozen=True, kw_only=True)
class PolicyObjective:
    """``policy loss x correction + beta x KL + weight x KL to the teacher - weight x entropy``, with token weights.

    The denominator is that of ``aggregation``, before rejections by the correction. Tokens with a non-finite log-prob
    are removed from mask and denominator, and counted.
    """

    loss: Function
    correction: Function
    aggregation: Aggregation
    aggregation_constant: float
    kl_beta: float = 0.0
    reward_kl_beta: float = 0.0
    """Weight of the KL penalty in the reward, which is not part of the loss."""
    kl_estimator: Estimator = "k3"
    entropy_weight: float = 0.0
    teacher_weight: float = 0.0
    """Weight of the teacher's term; 0 if it is part of the advantage."""
    teacher_estimator: Estimator = "k2"

    @classmethod
    def of(cls, config: RLConfig) -> PolicyObjective:
        """Build from flags; raises ``ConfigError`` like `extension.loss_of`."""
        algorithm, teacher = config.algorithm, config.teacher
        in_reward = config.critic.rl_kl_in_reward
        return cls(
            loss=loss_of(config),
            correction=correction_of(config),
            aggregation=algorithm.rl_loss_aggregation,
            aggregation_constant=float(config.rollout.rl_max_new_tokens),
            kl_beta=0.0 if in_reward else algorithm.grpo_kl_beta,
            reward_kl_beta=algorithm.grpo_kl_beta if in_reward else 0.0,
            kl_estimator=algorithm.rl_kl_estimator,
            entropy_weight=algorithm.grpo_entropy_term_weight,
            teacher_weight=teacher.rl_teacher_weight if teacher.rl_teacher_as == "loss" else 0.0,
            teacher_estimator=teacher.rl_teacher_kl_estimator,
        )

    def __call__(self, batch: TokenBatch) -> MicroLoss:
        """Compute the loss of a scored batch with current log-probs and entropy."""
        current = batch.current_logprobs
        old = current.detach() if batch.old_logprobs is None else batch.old_logprobs
        fixed = batch.inference_logprobs, batch.ref_logprobs, batch.teacher_logprobs
        mask = trusted_mask(batch.loss_mask, current, old, *fixed)
        dropped = batch.in_loss.sum() - (mask > 0).sum()
        batch = replace(batch, loss_mask=mask, old_logprobs=old)

        per_token, sums = self.loss(batch)
        with torch.no_grad():
            trust, marks = self.correction(batch)
        weights, denominator = token_weights(self.aggregation, batch, self.aggregation_constant)
        policy_loss = (per_token * trust * weights).sum()
        total, kl_loss = policy_loss, policy_loss.new_zeros([])
        if batch.ref_logprobs is not None:
            kl = kl_per_token(self.kl_estimator, current, batch.ref_logprobs, mask)
            kl_loss = (kl * weights).sum()
            total = total + self.kl_beta * kl_loss
        taught: dict[str, Tensor] = {}
        if batch.teacher_logprobs is not None:
            total, taught = self._with_teacher(total, batch, weights)
        entropy = torch.where(mask > 0, batch.entropy, 0.0)
        if self.entropy_weight:
            total = total - self.entropy_weight * (entropy * weights).sum()

        marks = dict(marks)
        clipped = marks.pop(CLIPPED, torch.zeros_like(mask, dtype=torch.bool))
        sums = {
            **summed(batch.advantage_sums | sums | marks),
            "actor/pg_loss": policy_loss,
            "actor/kl_loss": kl_loss,
            "actor/entropy": entropy.sum(),
            "actor/ppo_kl": torch.where(mask > 0, old - current.detach(), 0.0).sum(),
            "actor/dropped_tokens": dropped,
            "denominator": denominator,
            **taught,
            **mismatch_sums(batch, trust, clipped),
        }
        return total, denominator, {name: value.detach() for name, value in sums.items()}

    def _with_teacher(self, total: Tensor, batch: TokenBatch, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the teacher's term; return the total and sums for metrics."""
        mask = batch.loss_mask
        sums = {
            "teacher/kl": kl_per_token("k1", batch.old_logprobs, batch.teacher_logprobs, mask).sum(),
            "teacher/logprob": torch.where(mask > 0, batch.teacher_logprobs, 0.0).sum(),
        }
        if not self.teacher_weight:
            return total, sums
        kl = kl_per_token(self.teacher_estimator, batch.current_logprobs, batch.teacher_logprobs, mask)
        loss = (kl * weights).sum()
        return total + self.teacher_weight * loss, sums | {"teacher/loss": loss}


def objective_metrics(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Compute a step's metrics, under verl's names, from the sums over all micro-batches and ranks."""
    mismatch = {name: value for name, value in sums.items() if name.startswith("mismatch/")}
    own = {name: float(value) for name, value in sums.items() if name not in mismatch}
    tokens, denominator = max(float(mismatch["mismatch/tokens"]), 1.0), max(own.pop("denominator"), 1.0)
    divisors = dict.fromkeys(("actor/pg_loss", "actor/kl_loss", "teacher/loss"), denominator)
    divisors["actor/dropped_tokens"] = 1.0
    divisors |= {name: 1.0 for name in own if name.endswith("_max")}
    return {name: value / divisors.get(name, tokens) for name, value in own.items()} | mismatch_metrics(mismatch)
