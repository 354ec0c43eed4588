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
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist

from megatron_rl.algorithms import TokenBatch
from megatron_rl.algorithms.extension import Function, level_of
from megatron_rl.algorithms.mismatch import collapse_warning, mismatch_metrics, mismatch_sums
from megatron_rl.errors import TrainingError
from megatron_rl.quantization.rollout import RolloutQuantization
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.trainer.update import reduced

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
    """k3 estimate of KL(rollout || trainer), nats a token; of the other two the mean."""
    max_gap: float
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


@dataclass
class ParityGate:
    """Measures, reports, and says whether the run may go on."""

    scorer: Scorer
    quantization: RolloutQuantization
    limits: ParityLimits
    action: Action
    interval: int
    """Steps between two checks; 0 checks only the first rollout of each recipe."""
    data_group: dist.ProcessGroup
    correction_name: str
    correction: Function
    kv_cache: KVCacheRounding | None = None
    """What the engine's cache does to keys and values; None if it stores them as they are."""
    checked: str | None = None
    """The recipe of the last check."""

    def is_due(self, step: int) -> bool:
        """Before the first update with a recipe, and every ``interval`` steps."""
        first = self.checked != self.quantization.recipe
        return first or (self.interval > 0 and step % self.interval == 0)

    def check(self, updates: Sequence[Sequence[TokenBatch]]) -> ParityReport:
        """Score the samples and judge; collective."""
        batches = [batch for update in updates for batch in update]
        trainer, own_top = self._score(batches)
        tokens, measured = self._measured(trainer, batches)
        named = {
            "parity/log_ratio_mean": measured["rollout_corr/log_ratio_mean"],
            "parity/log_ratio_std": measured["rollout_corr/log_ratio_std"],
            "parity/gap_mean": measured["training/rollout_logprob_gap_mean"],
            "parity/p95": measured["rollout_corr/abs_log_ratio_p95"],
            "parity/max": measured["training/rollout_logprob_gap_max"],
            "parity/k3_kl": measured["rollout_corr/k3_kl"],
        }
        if self.quantization.linears is not None or self.kv_cache is not None:
            rounded = contextlib.nullcontext() if self.kv_cache is None else self.kv_cache.emulated()
            with self.quantization.emulated(), rounded:
                emulated, top = self._score(batches)
            _, own = self._measured(emulated, batches)
            named["parity/emulation_gap_mean"] = own["training/rollout_logprob_gap_mean"]
            named["parity/emulation_gap_max"] = own["training/rollout_logprob_gap_max"]
            named["parity/top1_agreement"] = agreement(own_top, top, batches, self.data_group)
        if not tokens:  # every group was without signal: nothing has been checked
            return ParityReport(self._format, 0, {}, ())
        self.checked = self.quantization.recipe
        return ParityReport(self._format, tokens, named, self._problems(named))

    def logged(self, step: int, report: ParityReport) -> dict[str, float]:
        """What goes into the step's row. The check after a restart is extra and does not: a resumed run logs the
        rows of an undisturbed one.
        """
        scheduled = step == 1 or (self.interval > 0 and step % self.interval == 0)
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
        if self.action == "warn":
            logger.warning("parity gate: %s", text)
            return False
        safer = self.quantization.fall_back() if self.action == "fallback" else None
        if safer is None:
            cache = "" if self.kv_cache is None else " or --rl-kv-cache-dtype auto"
            raise TrainingError(
                f"parity gate: {text}; use a safer --rl-rollout-quantization (none is exact){cache}, or "
                "go on with --rl-mismatch-action warn"
            )
        logger.warning("parity gate: %s; rollouts go on with %s instead of %s", text, safer, report.recipe)
        return True

    def judge_correction(self, metrics: Mapping[str, float]) -> None:
        """After a step's updates: has the correction done what it is for? ``metrics`` are the step's.

        Raises:
            TrainingError: it makes the mismatch larger and the action is not to warn.
        """
        collapse = collapse_warning(self.correction_name, self.correction, metrics)
        if collapse is not None:
            logger.warning("%s", collapse)
        gap = metrics.get("training/rollout_logprob_gap_mean", 0.0)
        left = metrics.get("rollout_corr/residual_gap", 0.0)
        if left <= _WORSE * gap + _ROUNDING or level_of(self.correction) == "sequence":
            return
        text = (
            f"--rl-correction {self.correction_name} leaves a mean log-prob gap of {left:.3g} where there was one of "
            f"{gap:.3g}: its weights point the wrong way"
        )
        if self.action != "warn":
            raise TrainingError(f"parity gate: {text}; use --rl-correction token_tis")
        logger.warning("parity gate: %s", text)

    @property
    def _format(self) -> str:
        """Of the rollouts, for people."""
        recipe = self.quantization.recipe
        return recipe if self.kv_cache is None else f"{recipe}, {self.kv_cache.name} KV cache"

    def _score(self, batches: Sequence[TokenBatch]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Log-probs [T] fp32 and likeliest tokens [T] of every batch."""
        scored = [self.scorer.logprobs_and_top(batch) for batch in batches]
        return [one for one, _ in scored], [top for _, top in scored]

    def _problems(self, metrics: dict[str, float]) -> tuple[str, ...]:
        limits, recipe = self.limits, self._format
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

    def _measured(
        self, scored: Sequence[torch.Tensor], batches: Sequence[TokenBatch]
    ) -> tuple[int, dict[str, float]]:
        """Loss tokens, and the mismatch of the rollout and ``scored`` log-probs under its logged names; collective."""
        parts = []
        for logprobs, batch in zip(scored, batches, strict=True):
            batch = replace(batch, old_logprobs=logprobs)
            parts.append(mismatch_sums(batch, batch.loss_mask, torch.zeros_like(batch.in_loss)))
        sums = reduced(parts, self.data_group, self.scorer.device)
        return (int(sums["mismatch/tokens"]), mismatch_metrics(sums)) if sums else (0, defaultdict(float))


def agreement(
    first: Sequence[torch.Tensor],
    second: Sequence[torch.Tensor],
    batches: Sequence[TokenBatch],
    data_group: dist.ProcessGroup,
) -> float:
    """Share of loss tokens before which two forward passes have the same likeliest token, [T] each; collective."""
    counts = torch.zeros(2, dtype=torch.float64)
    for a, b, batch in zip(first, second, batches, strict=True):
        # The prediction of token t stands at t - 1, which is in the same sequence: prompts are not empty.
        in_loss = batch.in_loss[1:]
        counts += torch.stack(((a == b)[:-1][in_loss].sum(), in_loss.sum())).double().cpu()
    dist.all_reduce(counts, group=data_group)
    agreeing, tokens = counts.tolist()
    return agreeing / max(tokens, 1.0)
