"""The parity gate: do trainer and rollout engine compute the same policy?

Before the first update the samples of a rollout are scored with the same weights:

    engine's log-probs ◄── mismatch ──► trainer's forward pass
            ▲                                  ▲
            └── emulation ──► trainer's forward pass on freshly quantised weights ──┘ top-1 agreement
                              and keys and values rounded as in the KV cache
                              and latent attention absorbed as in decode steps

The mismatch is what a correction must undo: the cost of quantisation. If engine and trainer round alike (fp32 on a
CPU), the emulation gap must be almost zero for any recipe; otherwise the engine used another format or other weights.
In bf16 the last bit moves activations between codes, layer after layer, so there the gap may be as large as the
mismatch. Stale copies are detected exactly. The absorption gap compares two passes of the trainer, with expanded heads
and absorbed: absorption's part of the mismatch.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_rl.algorithms import StepRewards, TokenBatch
from megatron_rl.algorithms.extension import correction_of, level_of
from megatron_rl.algorithms.mismatch import correction_problem, mismatch_metrics, mismatch_sums
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import TrainingError
from megatron_rl.platform.collectives import gather_json
from megatron_rl.quantization.rollout import RolloutQuantization
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.trainer.update import Sums, reduce_sums

logger = logging.getLogger(__name__)

_MEASURES = {
    "parity/log_ratio_mean": "rollout_corr/log_ratio_mean",
    "parity/log_ratio_std": "rollout_corr/log_ratio_std",
    "parity/gap_mean": "training/rollout_logprob_gap_mean",
    "parity/p95": "rollout_corr/abs_log_ratio_p95",
    "parity/max": "training/rollout_logprob_gap_max",
    "parity/k3_kl": "rollout_corr/k3_kl",
}
"""Names of the mismatch metrics."""

_Inside = Callable[[], AbstractContextManager[None]]
_Scored = tuple[torch.Tensor, torch.Tensor]
"""Log-probs of a batch, and its likeliest tokens."""


@dataclass(frozen=True)
class ParityReport:
    """The outcome of one check; equal on all ranks."""

    recipe: str
    """Recipe, and the KV cache format if it is narrower."""
    tokens: int
    metrics: dict[str, float]
    problems: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the lines for the log."""
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
        if "parity/absorption_gap_mean" in m:
            text.append(
                "  absorbed latent attention alone moves the trainer's log-probs: "
                f"mean {m['parity/absorption_gap_mean']:.1e}, max {m['parity/absorption_gap_max']:.1e}"
            )
        return text


class ParityGate:
    """Measures the mismatch and decides whether the run may continue: `--rl-mismatch-...`."""

    def __init__(
        self, config: RLConfig, scorer: Scorer, quantization: RolloutQuantization, data_group: dist.ProcessGroup,
        rounded: _Inside | None = None, absorbed: _Inside | None = None, is_exact: bool = False,
    ) -> None:  # fmt: skip
        """``rounded``: context in which the trainer rounds keys and values like the KV cache; None if they are not
        rounded.

        ``absorbed``: context in which it computes latent attention like decode steps; None without such layers.
        ``is_exact``: report any mismatch.
        """
        self._settings = config.quantization
        self._scorer, self._quantization, self._data_group, self._rounded = scorer, quantization, data_group, rounded
        self._absorbed = absorbed
        self._kv_cache = config.kv_cache_dtype
        self._is_exact = is_exact
        self._correction, self._correction_name = correction_of(config), config.algorithm.rl_correction
        # On a GPU 8-bit products are rounded to bf16 in any dtype.
        self.rounds_alike = not config.precision.bf16 and scorer.device.type != "cuda"
        """Whether engine and trainer round alike, so that the emulation gap must be almost zero."""
        self.emulation_limit = 1e-3 if self.rounds_alike else 0.05
        """Largest mean |engine - emulation| in nats per token; without equal rounding the mismatch, if larger."""
        self._checked: str | None = None

    def is_due(self, step: int) -> bool:
        """Return True before the first update with a recipe, and every `--rl-mismatch-interval` steps."""
        return self._checked != self._quantization.recipe or self._is_at_interval(step)

    def _is_at_interval(self, step: int) -> bool:
        interval = self._settings.rl_mismatch_interval
        return interval > 0 and step % interval == 0

    def check(self, updates: Sequence[Sequence[TokenBatch]], rewards: StepRewards | None) -> ParityReport:
        """Score the samples, and judge by the tokens drawn with the current weights; collective."""
        batches = [replace(batch, step=rewards) for update in updates for batch in update]
        # Without the loss of older tokens: their log-probs are of other weights.
        batches = [replace(batch, loss_mask=torch.where(batch.lag == 0, batch.loss_mask, 0.0)) for batch in batches]
        own = self._scored(updates)
        sums = self._sums(own, batches)
        tokens = int(sums.get("mismatch/tokens", 0))
        if not tokens:  # every group was without signal: nothing has been checked
            return ParityReport(self._format, 0, {}, ())
        measured = mismatch_metrics(sums)
        metrics, stale = {name: measured[measure] for name, measure in _MEASURES.items()}, []
        if self._quantization.linears.recipe is not None or self._rounded is not None:
            emulated = self._scored(updates, self._quantization.emulated, self._rounded, self._absorbed)
            metrics |= self._gaps("emulation", emulated, batches)
            found = gather_json(list(self._quantization.stale), self._data_group)
            stale = list(dict.fromkeys(name for names in found for name in names))
            tops = ([top for _, top in scored] for scored in (own, emulated))
            metrics["parity/top1_agreement"] = agreement(*tops, batches, self._data_group)
        if self._absorbed is not None:
            absorbed = self._scored(updates, self._absorbed)
            whole = [replace(batch, inference_logprobs=scored) for batch, (scored, _) in zip(batches, own, strict=True)]
            metrics |= self._gaps("absorption", absorbed, whole)
        self._checked = self._quantization.recipe
        return ParityReport(self._format, tokens, metrics, self._problems(metrics, stale))

    def step_metrics(self, step: int, report: ParityReport) -> dict[str, float]:
        """Return the step's metrics; without the check after a restart, which an uninterrupted run does not have."""
        return report.metrics if step == 1 or self._is_at_interval(step) else {}

    def act_on(self, report: ParityReport) -> bool:
        """Log the report; return True if the rollout must be repeated with a safer recipe.

        Raises:
            TrainingError: there are problems and the action is to stop, or there is no safer recipe.
        """
        for line in report.lines():
            logger.info("%s", line)
        if not report.problems:
            return False
        text = "; ".join(report.problems)
        if self._settings.rl_mismatch_action == "warn":
            logger.warning("parity gate: %s", text)
            return False
        safer = self._quantization.fall_back() if self._settings.rl_mismatch_action == "fallback" else None
        if safer is None:
            cache = "" if self._rounded is None else " or --rl-kv-cache-dtype auto"
            raise TrainingError(
                f"parity gate: {text}; use a safer --rl-rollout-quantization (none is exact){cache}, or "
                "go on with --rl-mismatch-action warn"
            )
        logger.warning("parity gate: %s; rollouts go on with %s instead of %s", text, safer, report.recipe)
        return True

    def judge_correction(self, metrics: Mapping[str, float], step: int) -> None:
        """Check after a step's updates that the correction reduced the mismatch, or that there was none.

        Raises:
            TrainingError: it increased the mismatch and the action is not to warn.
        """
        gap = metrics.get("training/rollout_logprob_gap_max", 0.0)
        if self._is_exact and gap:
            text = "step %d: log-probs of rollouts and trainer differ by up to %.3g; --batch-invariant-mode promises 0"
            logger.warning(text, step, gap)
        problem = correction_problem(self._correction_name, self._correction, metrics)
        if problem is None:
            return
        if level_of(self._correction) == "token" and self._settings.rl_mismatch_action != "warn":
            raise TrainingError(f"parity gate: {problem}")
        logger.warning("parity gate: %s", problem)

    @property
    def _format(self) -> str:
        """Format of the rollouts, for messages."""
        recipe = self._quantization.recipe
        return recipe if self._rounded is None else f"{recipe}, {self._kv_cache} KV cache"

    def _problems(self, metrics: dict[str, float], stale: Sequence[str]) -> tuple[str, ...]:
        found = []
        for name, what, limit, flag in (
            ("parity/k3_kl", "KL of rollout and trainer", self._settings.rl_mismatch_max_kl, "--rl-mismatch-max-kl"),
            ("parity/gap_mean", "mean log-prob gap", self._settings.rl_mismatch_max_gap, "--rl-mismatch-max-gap"),
        ):
            if not metrics[name] <= limit:  # also when it is NaN
                found.append(
                    f"{what} with {self._format} rollouts is {metrics[name]:.3g} nats a token, above {flag} {limit:g}"
                )
        emulation = metrics.get("parity/emulation_gap_mean", 0.0)
        limit = self.emulation_limit if self.rounds_alike else max(self.emulation_limit, metrics["parity/gap_mean"])
        if stale:
            found.append(
                f"the rollout ran on quantised copies of other weights in {len(stale)} layers, {stale[0]} first: they "
                "were not made anew after the weights changed"
            )
        elif not emulation <= limit:
            found.append(
                f"the engine's log-probs differ by {emulation:.3g} from the trainer's {self._format} forward pass on "
                f"the same weights (at most {limit:.3g}): it computed in another format"
            )
        return tuple(found)

    def _scored(self, updates: Sequence[Sequence[TokenBatch]], *as_rollouts: _Inside | None) -> list[_Scored]:
        """Score with the trainer's forward pass, inside all contexts of ``as_rollouts``."""
        with contextlib.ExitStack() as stack:
            for inside in filter(None, as_rollouts):
                stack.enter_context(inside())
            return [scored for update in updates for scored in self._scorer.logprobs_and_top(update)]

    def _gaps(self, name: str, scored: Sequence[_Scored], batches: Sequence[TokenBatch]) -> dict[str, float]:
        found = mismatch_metrics(self._sums(scored, batches))
        return {f"parity/{name}_gap_{each}": found[f"training/rollout_logprob_gap_{each}"] for each in ("mean", "max")}

    def _sums(self, scored: Sequence[_Scored], batches: Sequence[TokenBatch]) -> Sums:
        """Return the sums of the mismatch between the rollout and the ``scored`` log-probs; collective."""
        parts = []
        for (logprobs, _), batch in zip(scored, batches, strict=True):
            batch = replace(batch, old_logprobs=logprobs)
            parts.append(mismatch_sums(batch, batch.loss_mask, torch.zeros_like(batch.in_loss)))
        return reduce_sums(parts, self._data_group, self._scorer.device)


def agreement(
    first: Sequence[torch.Tensor], second: Sequence[torch.Tensor], batches: Sequence[TokenBatch],
    data_group: dist.ProcessGroup,
) -> float:  # fmt: skip
    """Return the share of loss tokens with the same likeliest token in two forward passes, [T] each; collective."""
    counts = torch.zeros(2, dtype=torch.float64)
    for a, b, batch in zip(first, second, batches, strict=True):
        # The prediction of token t is at t - 1, in the same sequence, because prompts are not empty.
        in_loss = batch.in_loss[1:]
        counts += torch.stack(((a == b)[:-1][in_loss].sum(), in_loss.sum())).double().cpu()
    dist.all_reduce(counts, group=data_group)
    agreeing, tokens = counts.tolist()
    return agreeing / max(tokens, 1.0)
