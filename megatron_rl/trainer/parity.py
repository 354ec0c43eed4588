"""The parity gate: do trainer and rollout still talk about the same policy?

Before the first update, the samples of a rollout are scored three times by what is at hand:

    engine's log-probs ◄── mismatch ──► trainer's forward pass
            ▲                                  ▲
            └── emulation ──► trainer's forward pass on freshly quantised weights ──┘ top-1 agreement
                              and keys and values rounded as the KV cache has them
                              and latent attention absorbed as in decode steps

The mismatch is what a correction has to undo, and what quantisation costs. Where the kernels of both round alike (fp32
on a CPU) the emulation gap must be next to nothing whatever the recipe: if it is not, the engine ran another format or
other weights. In bf16 a last bit moves activations over the borders between codes, layer after layer: there the gap
need only be no larger than the mismatch. Whether copies are stale is compared to the bit, everywhere.
The absorption gap is between two passes of the trainer, whole heads and absorbed: absorption's part of the mismatch.
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
from megatron_rl.trainer.update import Sums, reduced

logger = logging.getLogger(__name__)

_MEASURES = {
    "parity/log_ratio_mean": "rollout_corr/log_ratio_mean",
    "parity/log_ratio_std": "rollout_corr/log_ratio_std",
    "parity/gap_mean": "training/rollout_logprob_gap_mean",
    "parity/p95": "rollout_corr/abs_log_ratio_p95",
    "parity/max": "training/rollout_logprob_gap_max",
    "parity/k3_kl": "rollout_corr/k3_kl",
}
"""Under which name the mismatch has them."""

_Inside = Callable[[], AbstractContextManager[None]]
_Scored = tuple[torch.Tensor, torch.Tensor]
"""Log-probs of a batch, and its top tokens."""


@dataclass(frozen=True)
class ParityReport:
    """The outcome of one check; equal on all ranks."""

    recipe: str
    """And what is stored in the KV cache, if that has fewer bits."""
    tokens: int
    metrics: dict[str, float]
    problems: tuple[str, ...]

    def lines(self) -> list[str]:
        """Write the lines for the log."""
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
    """Measures, reports, and says whether the run may go on: `--rl-mismatch-...`."""

    def __init__(
        self, config: RLConfig, scorer: Scorer, quantization: RolloutQuantization, data_group: dist.ProcessGroup,
        rounded: _Inside | None = None, absorbed: _Inside | None = None, is_exact: bool = False,
    ) -> None:  # fmt: skip
        """Inside ``rounded`` the trainer rounds keys and values as the KV cache does; None where it does not.

        Inside ``absorbed`` it computes latent attention as decoding does; None where that is no other way. If the run
        ``is_exact``, any mismatch is reported.
        """
        self._settings = config.quantization
        self._scorer, self._quantization, self._data_group, self._rounded = scorer, quantization, data_group, rounded
        self._absorbed = absorbed
        self._kv_cache = config.kv_cache_dtype
        self._is_exact = is_exact
        self._correction, self._correction_name = correction_of(config), config.algorithm.rl_correction
        # On a GPU the 8-bit products come out in bf16 whatever the model's dtype.
        self.rounds_alike = not config.precision.bf16 and scorer.device.type != "cuda"
        """Whether engine and trainer round to the same numbers, so that the emulation has nothing left to explain."""
        self.emulation_limit = 1e-3 if self.rounds_alike else 0.05
        """Largest mean |engine - emulation| in nats a token; where they do not round alike, the mismatch if larger."""
        self._checked: str | None = None

    def is_due(self, step: int) -> bool:
        """Return true before the first update with a recipe, and every `--rl-mismatch-interval` steps."""
        return self._checked != self._quantization.recipe or self._is_at_interval(step)

    def _is_at_interval(self, step: int) -> bool:
        interval = self._settings.rl_mismatch_interval
        return interval > 0 and step % interval == 0

    def check(self, updates: Sequence[Sequence[TokenBatch]], rewards: StepRewards | None) -> ParityReport:
        """Score the samples and judge by the tokens that the weights of the step's beginning drew; collective."""
        batches = [_fresh(replace(batch, step=rewards)) for update in updates for batch in update]
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

    def logged(self, step: int, report: ParityReport) -> dict[str, float]:
        """Return what goes into the step's row: not the check after a restart, which an undisturbed run has not."""
        return report.metrics if step == 1 or self._is_at_interval(step) else {}

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
        """Check after a step's updates that the correction worked, or that there was nothing to correct.

        Raises:
            TrainingError: it makes the mismatch larger and the action is not to warn.
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
        """Of the rollouts, for people."""
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
        """By the trainer's forward pass, inside all of ``as_rollouts``."""
        with contextlib.ExitStack() as stack:
            for inside in filter(None, as_rollouts):
                stack.enter_context(inside())
            return [scored for update in updates for scored in self._scorer.logprobs_and_top(update)]

    def _gaps(self, name: str, scored: Sequence[_Scored], batches: Sequence[TokenBatch]) -> dict[str, float]:
        found = mismatch_metrics(self._sums(scored, batches))
        return {f"parity/{name}_gap_{each}": found[f"training/rollout_logprob_gap_{each}"] for each in ("mean", "max")}

    def _sums(self, scored: Sequence[_Scored], batches: Sequence[TokenBatch]) -> Sums:
        """Of the mismatch of the rollout and the ``scored`` log-probs; collective."""
        parts = []
        for (logprobs, _), batch in zip(scored, batches, strict=True):
            batch = replace(batch, old_logprobs=logprobs)
            parts.append(mismatch_sums(batch, batch.loss_mask, torch.zeros_like(batch.in_loss)))
        return reduced(parts, self._data_group, self._scorer.device)


def _fresh(batch: TokenBatch) -> TokenBatch:
    """Without the loss of older tokens, whose log-probs are of other weights."""
    return replace(batch, loss_mask=torch.where(batch.lag == 0, batch.loss_mask, 0.0))


def agreement(
    first: Sequence[torch.Tensor], second: Sequence[torch.Tensor], batches: Sequence[TokenBatch],
    data_group: dist.ProcessGroup,
) -> float:  # fmt: skip
    """Share of loss tokens before which two forward passes have the same likeliest token, [T] each; collective."""
    counts = torch.zeros(2, dtype=torch.float64)
    for a, b, batch in zip(first, second, batches, strict=True):
        # The prediction of token t stands at t - 1, which is in the same sequence: prompts are not empty.
        in_loss = batch.in_loss[1:]
        counts += torch.stack(((a == b)[:-1][in_loss].sum(), in_loss.sum())).double().cpu()
    dist.all_reduce(counts, group=data_group)
    agreeing, tokens = counts.tolist()
    return agreeing / max(tokens, 1.0)
