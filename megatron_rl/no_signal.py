"""A run that has nothing to learn from says so: no group had samples that did better than others."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from megatron_rl.config import RLConfig
from megatron_rl.progress import Progress

PATIENCE = 3
"""Steps without a signal in a row before the warning."""
_MANY_CUT = 0.5

logger = logging.getLogger(__name__)


def note_signal(progress: Progress, metrics: Mapping[str, float], config: RLConfig) -> None:
    """Book a step by its metrics; warns once for each stretch of `PATIENCE` steps or more."""
    without = metrics.get("training/groups_with_signal") == 0
    progress.steps_without_signal = progress.steps_without_signal + 1 if without else 0
    if progress.steps_without_signal == PATIENCE:
        logger.warning(
            "no group had a signal for %d steps in a row, so there was nothing to learn from; in the last one %s",
            PATIENCE, likely_reason(metrics, config),
        )  # fmt: skip


def likely_reason(metrics: Mapping[str, float], config: RLConfig) -> str:
    """What a step without a signal looked like, and what to do about it."""
    if "critic/rewards/mean" not in metrics:
        return f"all {metrics.get('training/failed_grades', 0):.0f} grades failed: see logs/ of the run directory"
    low, high = metrics["critic/rewards/min"], metrics["critic/rewards/max"]
    if low < high:
        size, temperature = config.algorithm.grpo_group_size, config.rollout.rl_temperature
        return (
            f"rewards were {low:g} to {high:g}, but equal within each group: raise --grpo-group-size ({size}) or "
            f"--rl-temperature ({temperature:g}), or give tasks that are neither too easy nor too hard"
        )
    if high > 0:
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
        "(prompt, chat template); see rollouts/"
    )
