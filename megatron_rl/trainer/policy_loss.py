"""The policy-gradient loss of one micro-batch and the sums its metrics are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist

from megatron_rl.algorithms.aggregation import (
    Aggregation,
    sequence_of_tokens,
    token_weights,
    trusted_mask,
)
from megatron_rl.algorithms.corrections.statistics import MismatchStatistics, mismatch_statistics
from megatron_rl.algorithms.interfaces import (
    CorrectionConfig,
    CorrectionFunction,
    LossConfig,
    LossFunction,
)
from megatron_rl.algorithms.kl import Estimator, kl_per_token
from megatron_rl.trainer.accumulate import MicroLoss
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.types import PackedBatch


@dataclass(frozen=True)
class ScoredBatch:
    """A micro-batch with the log-probs that stay fixed during the step's updates."""

    batch: PackedBatch
    old_logprobs: torch.Tensor | None
    """[T] fp32 of the trainer's policy before the first update; None when there is one update, where
    they equal the current ones."""
    ref_logprobs: torch.Tensor | None
    """[T] fp32 of the reference; None without a KL penalty."""


@dataclass(frozen=True)
class LossSettings:
    """Which extension does what, with its settings."""

    loss: LossFunction
    loss_config: LossConfig
    correction: CorrectionFunction
    correction_config: CorrectionConfig
    aggregation: Aggregation
    aggregation_constant: float
    kl_beta: float
    kl_estimator: Estimator
    entropy_weight: float


@dataclass(frozen=True)
class LossSums:
    """Sums over a micro-batch, each [] fp64 and detached; divided once, on the host."""

    policy_loss: torch.Tensor
    kl_loss: torch.Tensor
    denominator: torch.Tensor
    tokens: torch.Tensor
    dropped_tokens: torch.Tensor
    entropy: torch.Tensor
    old_minus_current: torch.Tensor
    clipped_upper: torch.Tensor
    clipped_lower: torch.Tensor
    dual_clipped: torch.Tensor


@dataclass(frozen=True)
class LossStatistics:
    """What one micro-batch contributes to the metrics."""

    sums: LossSums
    mismatch: MismatchStatistics


class PolicyLossFunction:
    """``policy loss x correction + beta x KL - weight x entropy``, summed with token weights.

    The denominator is that of `LossSettings.aggregation`, before any rejection by the correction.
    Tokens with a non-finite log-prob leave mask and denominator and are counted.
    """

    def __init__(self, scorer: Scorer, settings: LossSettings) -> None:
        self._scorer = scorer
        self._settings = settings

    def __call__(self, logits: torch.Tensor, scored: ScoredBatch) -> MicroLoss:
        """``logits`` [T, V / tensor ranks] of the model being trained."""
        settings, batch = self._settings, scored.batch
        entropy_kind = "differentiable" if settings.entropy_weight else "detached"
        selected = self._scorer.select(logits, batch, entropy_kind)
        current = selected.logprobs
        old = current.detach() if scored.old_logprobs is None else scored.old_logprobs
        fixed = [old, batch.inference_logprobs]
        fixed += [] if scored.ref_logprobs is None else [scored.ref_logprobs]
        mask, dropped = trusted_mask(batch.loss_mask, current, *fixed)

        sequence = sequence_of_tokens(batch.cu_seqlens, batch.token_ids.numel())
        count = len(batch.lengths)
        loss = settings.loss(
            current, old, batch.advantages, mask, sequence, count, settings.loss_config
        )
        correction = settings.correction(
            old, batch.inference_logprobs, mask, sequence, count, settings.correction_config
        )
        weights, denominator = token_weights(
            settings.aggregation, mask, sequence, count, settings.aggregation_constant
        )
        policy_loss = (loss.per_token * correction.weights * weights).sum()
        total, kl_loss = policy_loss, policy_loss.new_zeros([])
        if scored.ref_logprobs is not None:
            kl = kl_per_token(settings.kl_estimator, current, scored.ref_logprobs, mask)
            kl_loss = (kl * weights).sum()
            total = total + settings.kl_beta * kl_loss
        entropy = torch.where(mask > 0, selected.entropy, 0.0)
        if settings.entropy_weight:
            total = total - settings.entropy_weight * (entropy * weights).sum()

        moved = torch.where(mask > 0, old - current.detach(), 0.0)
        sums = LossSums(
            policy_loss=policy_loss,
            kl_loss=kl_loss,
            denominator=denominator,
            tokens=mask.sum(),
            dropped_tokens=dropped,
            entropy=entropy.sum(),
            old_minus_current=moved.sum(),
            clipped_upper=loss.num_clipped_upper,
            clipped_lower=loss.num_clipped_lower,
            dual_clipped=loss.num_dual_clipped,
        )
        mismatch = mismatch_statistics(old, batch.inference_logprobs, mask, correction)
        return MicroLoss(total, denominator, LossStatistics(_detached(sums), mismatch))


def _detached(sums: LossSums) -> LossSums:
    return LossSums(*(getattr(sums, field.name).detach().double() for field in fields(sums)))


def reduce_statistics(
    statistics: Sequence[LossStatistics], data_group: dist.ProcessGroup, device: torch.device
) -> dict[str, float]:
    """Metrics of a whole step under verl's names; collective, one read of the device."""
    names = [field.name for field in fields(LossSums)]
    own, mismatch = torch.zeros(len(names), dtype=torch.float64, device=device), MismatchStatistics.zeros(device)
    for item in statistics:
        own += torch.stack([getattr(item.sums, name) for name in names])
        mismatch = mismatch.merge(item.mismatch)
    totals, largest = torch.cat((own, mismatch.sum_tensor())), mismatch.max_tensor()
    dist.all_reduce(totals, group=data_group)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=data_group)
    read = torch.cat((totals, largest)).cpu()
    own, mismatch_sums, largest = read.tensor_split([len(names), totals.numel()])
    sums = dict(zip(names, own.tolist(), strict=True))
    mismatch = MismatchStatistics.from_tensors(mismatch_sums, largest)
    tokens, denominator = max(sums["tokens"], 1.0), max(sums["denominator"], 1.0)
    return {
        "actor/pg_loss": sums["policy_loss"] / denominator,
        "actor/kl_loss": sums["kl_loss"] / denominator,
        "actor/entropy": sums["entropy"] / tokens,
        "actor/ppo_kl": sums["old_minus_current"] / tokens,
        "actor/pg_clipfrac": (sums["clipped_upper"] + sums["clipped_lower"]) / tokens,
        "actor/pg_clipfrac_lower": sums["dual_clipped"] / tokens,
        "actor/dropped_tokens": sums["dropped_tokens"],
        **_mismatch_metrics(mismatch.metrics()),
    }


def _mismatch_metrics(values: dict[str, float]) -> dict[str, float]:
    """What ``MismatchStatistics.metrics`` gives, under the logged names."""
    return {
        "training/rollout_logprob_gap_mean": values["mean_abs_delta_logprob"],
        "training/rollout_logprob_gap_max": values["max_abs_delta_logprob"],
        "rollout_corr/k3_kl": values["k3_kl"],
        "rollout_corr/log_ratio_mean": values["mean_delta_logprob"],
        "rollout_corr/log_ratio_std": values["std_delta_logprob"],
        "rollout_corr/abs_log_ratio_p95": values["p95_abs_delta_logprob"],
        "rollout_corr/residual_gap": values["residual_gap"],
        "rollout_corr/rollout_is_mean": values["mean_weight"],
        "rollout_corr/rollout_is_eff_sample_size": values["effective_sample_size"],
        "rollout_corr/rollout_is_clipped": values["fraction_clipped"],
    }
