"""The parity gate: do trainer and rollout still talk about the same policy?

Before the first update, the samples of a rollout are scored three times by what is at hand:

    engine's log-probs ◄── mismatch ──► trainer's forward pass
            ▲                                  ▲
            └── emulation ──► trainer's forward pass on freshly quantised weights ──┘ top-1 agreement
                              and keys and values rounded as the KV cache has them

The mismatch is what a correction has to undo, and what quantisation costs. The emulation gap must be next to
nothing whatever the recipe: if it is not, the engine ran other weights (a stale copy) or another format.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from megatron_rl.algorithms.aggregation import sequence_of_tokens
from megatron_rl.algorithms.corrections.collapse import collapse_warning
from megatron_rl.algorithms.corrections.composition import correction_modules, get_correction
from megatron_rl.algorithms.corrections.statistics import MismatchStatistics, mismatch_statistics
from megatron_rl.algorithms.interfaces import CorrectionConfig
from megatron_rl.errors import TrainingError
from megatron_rl.quantization.rollout import RolloutQuantization
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.types import PackedBatch

logger = logging.getLogger(__name__)

Action = Literal["warn", "stop", "fallback"]

EMULATION_LIMIT = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Largest mean |engine - emulation| in nats a token: rounding of the dtype, not of the recipe."""


_WORSE, _ROUNDING = 1.25, 1e-5
"""A correction may leave the gap as it is, and fp32 log-probs are not exact; more is a mistake in its weights."""


@dataclass(frozen=True)
class ParityLimits:
    """What is still agreement."""

    max_kl: float
    """k3 estimate of KL(rollout || trainer), nats a token."""
    max_gap: float
    """Mean |log-ratio|, nats a token."""
    max_emulation_gap: float


@dataclass(frozen=True)
class KVCacheRounding:
    """A KV cache of fewer bits than the model's numbers."""

    name: str
    emulated: Callable[[], AbstractContextManager[None]]
    """Inside, the trainer's forward pass rounds keys and values as the last rollout did."""


@dataclass(frozen=True)
class ParityReport:
    """The outcome of one check; equal on all ranks."""

    recipe: str
    """And what is stored in the KV cache, if that has fewer bits."""
    tokens: int
    metrics: dict[str, float]
    problems: tuple[str, ...]

    def lines(self) -> list[str]:
        """For the log."""
        m = self.metrics
        if not m:
            return []
        text = [
            f"parity of rollout ({self.recipe}) and trainer over {self.tokens:,} tokens: log-ratio mean "
            f"{m['parity/log_ratio_mean']:+.2e}, sigma {m['parity/log_ratio_std']:.2e}, |p95| {m['parity/p95']:.2e}, "
            f"max {m['parity/max']:.2e}, k3 KL {m['parity/k3_kl']:.2e}"
        ]
        if "parity/top1_agreement" in m:
            text.append(
                f"  top-1 agreement {m['parity/top1_agreement']:.2%}; engine against the trainer's own quantised "
                f"forward pass: mean {m['parity/emulation_gap_mean']:.1e}, max {m['parity/emulation_gap_max']:.1e}"
            )
        return text


class ParityGate:
    """Measures, reports, and says whether the run may go on."""

    def __init__(
        self,
        scorer: Scorer,
        quantization: RolloutQuantization,
        limits: ParityLimits,
        action: Action,
        interval: int,
        data_group: dist.ProcessGroup,
        correction: str,
        kv_cache: KVCacheRounding | None = None,
    ) -> None:
        """``interval``: steps between two checks; 0 checks only the first rollout of each recipe.

        ``kv_cache``: what the engine's cache does to keys and values; None if it stores them as they are.
        """
        self._scorer = scorer
        self._quantization = quantization
        self._limits = limits
        self._action = action
        self._interval = interval
        self._data_group = data_group
        self._correction = correction
        self._kv_cache = kv_cache
        modules = correction_modules(correction)
        self._is_sequence_level = any(module.LEVEL == "sequence" for module in modules)
        self._checked: str | None = None

    def is_due(self, step: int) -> bool:
        """Before the first update with a recipe, and every ``interval`` steps."""
        first = self._checked != self._quantization.recipe
        return first or (self._interval > 0 and step % self._interval == 0)

    def check(self, updates: Sequence[Sequence[PackedBatch]]) -> ParityReport:
        """Score the samples and judge; collective."""
        batches = [batch for update in updates for batch in update]
        trainer, own_top = self._score(batches)
        metrics = self._reduced([
            _statistics(scored, batch) for scored, batch in zip(trainer, batches, strict=True)
        ])
        tokens = int(metrics.pop("tokens"))
        named = {
            "parity/log_ratio_mean": metrics["mean_delta_logprob"],
            "parity/log_ratio_std": metrics["std_delta_logprob"],
            "parity/gap_mean": metrics["mean_abs_delta_logprob"],
            "parity/p95": metrics["p95_abs_delta_logprob"],
            "parity/max": metrics["max_abs_delta_logprob"],
            "parity/k3_kl": metrics["k3_kl"],
        }
        if self._quantization.linears is not None or self._kv_cache is not None:
            with self._quantization.emulated(), self._rounded_keys_and_values():
                emulated, top = self._score(batches)
            own = self._reduced([
                _statistics(scored, batch) for scored, batch in zip(emulated, batches, strict=True)
            ])
            named["parity/emulation_gap_mean"] = own["mean_abs_delta_logprob"]
            named["parity/emulation_gap_max"] = own["max_abs_delta_logprob"]
            named["parity/top1_agreement"] = self._agreement(own_top, top, batches)
        if not tokens:  # every group was without signal: nothing has been checked
            return ParityReport(self._format, 0, {}, ())
        self._checked = self._quantization.recipe
        problems = self._problems(named)
        return ParityReport(self._format, tokens, named, problems)

    def logged(self, step: int, report: ParityReport) -> dict[str, float]:
        """What goes into the step's row. The check after a restart is extra and does not: a resumed run logs the
        rows of an undisturbed one.
        """
        scheduled = step == 1 or (self._interval > 0 and step % self._interval == 0)
        return report.metrics if scheduled else {}

    def act_on(self, report: ParityReport) -> bool:
        """Log the report; True when the rollout is to be done again with a safer recipe.

        Raises:
            TrainingError: there are problems and the action is to stop, or there is nothing to fall back to.
        """
        for line in report.lines():
            logger.info("%s", line)
        if not report.problems:
            return False
        text = "; ".join(report.problems)
        if self._action == "warn":
            logger.warning("parity gate: %s", text)
            return False
        safer = self._quantization.fall_back() if self._action == "fallback" else None
        if safer is None:
            raise TrainingError(
                f"parity gate: {text}; use a safer --rl-rollout-quantization (none is exact){self._safer_cache}, or "
                "go on with --rl-mismatch-action warn"
            )
        logger.warning("parity gate: %s; rollouts go on with %s instead of %s", text, safer, report.recipe)
        return True

    def judge_correction(self, metrics: Mapping[str, float]) -> None:
        """After a step's updates: has the correction done what it is for? ``metrics`` are the step's.

        Raises:
            TrainingError: it makes the mismatch larger and the action is not to warn.
        """
        collapse = collapse_warning(self._correction, metrics)
        if collapse is not None:
            logger.warning("%s", collapse)
        gap = metrics.get("training/rollout_logprob_gap_mean", 0.0)
        left = metrics.get("rollout_corr/residual_gap", 0.0)
        if left <= _WORSE * gap + _ROUNDING or self._is_sequence_level:
            return
        text = (
            f"--rl-correction {self._correction} leaves a mean log-prob gap of {left:.3g} where there was one of "
            f"{gap:.3g}: its weights point the wrong way"
        )
        if self._action != "warn":
            raise TrainingError(f"parity gate: {text}; use --rl-correction token_tis")
        logger.warning("parity gate: %s", text)

    @property
    def _format(self) -> str:
        """Of the rollouts, for people."""
        recipe = self._quantization.recipe
        return recipe if self._kv_cache is None else f"{recipe}, {self._kv_cache.name} KV cache"

    @property
    def _safer_cache(self) -> str:
        return "" if self._kv_cache is None else " or --rl-kv-cache-dtype auto"

    def _rounded_keys_and_values(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._kv_cache is None else self._kv_cache.emulated()

    def _score(self, batches: Sequence[PackedBatch]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Log-probs [T] fp32 and likeliest tokens [T] of every batch."""
        scored = [self._scorer.logprobs_and_top(batch) for batch in batches]
        return [one for one, _ in scored], [top for _, top in scored]

    def _problems(self, metrics: dict[str, float]) -> tuple[str, ...]:
        limits, recipe = self._limits, self._format
        found = []
        for name, what, limit, flag in (
            ("parity/k3_kl", "KL of rollout and trainer", limits.max_kl, "--rl-mismatch-max-kl"),
            ("parity/gap_mean", "mean log-prob gap", limits.max_gap, "--rl-mismatch-max-gap"),
        ):
            if not metrics[name] <= limit:  # also when it is NaN
                found.append(
                    f"{what} with {recipe} rollouts is {metrics[name]:.3g} nats a token, above {flag} {limit:g}"
                )
        emulation = metrics.get("parity/emulation_gap_mean", 0.0)
        if not emulation <= limits.max_emulation_gap:
            found.append(
                f"the engine's log-probs differ by {emulation:.3g} from the trainer's {recipe} forward pass on freshly "
                f"quantised weights (at most {limits.max_emulation_gap:g}): it ran stale or other weights"
            )
        return tuple(found)

    def _reduced(self, statistics: Sequence[MismatchStatistics]) -> dict[str, float]:
        merged = MismatchStatistics.zeros(self._scorer.device)
        for one in statistics:
            merged = merged.merge(one)
        sums, largest = merged.sum_tensor(), merged.max_tensor()
        dist.all_reduce(sums, group=self._data_group)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._data_group)
        merged = MismatchStatistics.from_tensors(sums, largest)
        return merged.metrics() | {"tokens": float(merged.num_tokens)}

    def _agreement(
        self,
        first: Sequence[torch.Tensor],
        second: Sequence[torch.Tensor],
        batches: Sequence[PackedBatch],
    ) -> float:
        """Share of loss tokens before which both forward passes have the same likeliest token."""
        counts = torch.zeros(2, dtype=torch.float64, device=self._scorer.device)
        for a, b, batch in zip(first, second, batches, strict=True):
            # The prediction of token t stands at t - 1, which is in the same sequence: prompts are not empty.
            in_loss = batch.loss_mask[1:] > 0
            counts += torch.stack(((a == b)[:-1][in_loss].sum(), in_loss.sum())).double()
        dist.all_reduce(counts, group=self._data_group)
        agreeing, tokens = counts.tolist()
        return agreeing / max(tokens, 1.0)


def _statistics(scored: torch.Tensor, batch: PackedBatch) -> MismatchStatistics:
    sequence = sequence_of_tokens(batch.cu_seqlens, batch.token_ids.numel())
    correction = get_correction("none")(
        scored, batch.inference_logprobs, batch.loss_mask, sequence, len(batch.lengths), CorrectionConfig()
    )
    return mismatch_statistics(scored, batch.inference_logprobs, batch.loss_mask, correction)
