"""Where a run stands: the counters that move from step to step and go into every checkpoint."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import TrainingError

MAX_CONSECUTIVE_SKIPS = 3
PATIENCE = 3
"""Steps without reward variance in a row before the warning."""
_MANY_CUT = 0.5

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """Mutable on purpose: the one object the loop advances."""

    step: int = 0
    """Finished steps."""
    updates: int = 0
    """Applied optimizer updates."""
    policy_version: int = 0
    """Steps that changed the weights; stamped on every completion."""
    tokens: int = 0
    """Tokens generated (RL) or trained on (supervised)."""
    logprob_gap_max: float = 0.0
    """Largest |inference - trainer| log-prob of any token so far."""
    consecutive_skips: int = 0
    """Updates skipped in a row because of non-finite gradients."""
    best: float | None = None
    """Highest value of --keep-best's metric so far."""
    critic_updates: int = 0
    """Applied updates of the critic."""
    evaluated_first: bool = False
    """The evaluation before the first step is done."""
    steps_without_signal: int = 0
    """Steps in a row in which no group had reward variance."""

    @property
    def newest_row(self) -> int:
        """Step of the newest metrics that a resumed run keeps; -1 before there are any."""
        return self.step if self.step or self.evaluated_first else -1

    def state_dict(self) -> dict[str, Any]:
        """Return all of it, for a checkpoint."""
        return dataclasses.asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        for entry in dataclasses.fields(self):
            setattr(self, entry.name, state.get(entry.name, entry.default))

    def is_best(self, value: float | None) -> bool:
        """Book an evaluation; whether it is better than all before. None: it had no such metric."""
        if value is None or (self.best is not None and value <= self.best):
            return False
        self.best = value
        return True

    def count_updates(self, applied: int, skipped: int) -> None:
        """Book a step's updates.

        Raises:
            TrainingError: the gradient was not finite ``MAX_CONSECUTIVE_SKIPS`` times in a row.
        """
        self.updates += applied
        if applied:
            self.policy_version += 1
        # Of several updates a step some are applied: then weights and gradients are finite, whatever their order was.
        self.consecutive_skips = 0 if applied else self.consecutive_skips + skipped
        if self.consecutive_skips >= MAX_CONSECUTIVE_SKIPS:
            raise TrainingError(
                f"{self.consecutive_skips} updates in a row had a non-finite gradient and were skipped; the batches "
                "are in the run directory's logs/; lower --lr or look for the cause there"
            )


def note_signal(progress: Progress, metrics: Mapping[str, float], config: RLConfig) -> None:
    """Book a step by its metrics; warns once for each stretch of `PATIENCE` steps, or of all steps of a shorter run."""
    without = metrics.get("training/groups_with_signal") == 0
    progress.steps_without_signal = progress.steps_without_signal + 1 if without else 0
    if progress.steps_without_signal == min(PATIENCE, config.total_steps):
        logger.warning(
            "no group had reward variance for %d steps in a row, so there was nothing to learn; in the last one %s",
            progress.steps_without_signal, likely_reason(metrics, config),
        )  # fmt: skip


def likely_reason(metrics: Mapping[str, float], config: RLConfig) -> str:
    """Say what a step without reward variance looked like, and what to do about it."""
    if "critic/rewards/mean" not in metrics:
        return f"all {metrics.get('training/failed_grades', 0):.0f} grades failed: see logs/ of the run directory"
    low, high = metrics["critic/rewards/min"], metrics["critic/rewards/max"]
    if low < high:
        size, temperature = config.algorithm.grpo_group_size, config.rollout.rl_temperature
        return (
            f"rewards were {low:g} to {high:g}, but equal within each group: raise --grpo-group-size ({size}) or "
            f"--rl-temperature ({temperature:g}), or give tasks that are neither too easy nor too hard"
        )
    if high >= 1:
        return f"every reward was {high:g}: the tasks are too easy, or the grader accepts anything; see rollouts/"
    cut = metrics.get("response_length/clip_ratio", 0.0)
    if cut >= _MANY_CUT:
        limit = config.rollout.rl_max_new_tokens
        return (
            f"every reward was {low:g}, and {cut:.0%} of the answers were cut before they ended: raise "
            f"--rl-max-new-tokens ({limit}), or start from a model that ends its answers"
        )
    return (
        f"every reward was {low:g}: the tasks are too hard, or the answers lack the form that the grader looks for "
        f"(prompt, chat template), or {low:g} is the highest reward and they are too easy; see rollouts/"
    )
