"""Metric names in one place. They follow verl's where verl has one.

``val/<environment>/<measure>`` holds an evaluation, ``timing_s/<phase>`` the seconds of a phase.
"""

from __future__ import annotations

REWARD_MEAN = "critic/rewards/mean"
SCORE_MEAN = "critic/score/mean"

POLICY_LOSS = "actor/pg_loss"
ENTROPY = "actor/entropy"
CLIP_FRACTION = "actor/pg_clipfrac"
CLIP_FRACTION_LOWER = "actor/pg_clipfrac_lower"
POLICY_KL = "actor/ppo_kl"
REFERENCE_KL_LOSS = "actor/kl_loss"
GRAD_NORM = "actor/grad_norm"
LEARNING_RATE = "actor/lr"

RESPONSE_LENGTH_MEAN = "response_length/mean"
RESPONSE_LENGTH_MAX = "response_length/max"
RESPONSE_CLIP_RATIO = "response_length/clip_ratio"

LOGPROB_GAP_MEAN = "training/rollout_logprob_gap_mean"
LOGPROB_GAP_MAX = "training/rollout_logprob_gap_max"

THROUGHPUT = "perf/throughput"
ROLLOUT_THROUGHPUT = "perf/rollout_tokens_per_s"
ROLLOUT_IDLE_SHARE = "perf/rollout_idle_share"
"""The mean over the data-parallel ranks; see `idle_share`."""

SUPERVISED_LOSS = "train/loss"
PERPLEXITY = "train/perplexity"

VALIDATION_PREFIX = "val/"
VALIDATION_LENGTH = "response_length"
"""The one measure of an evaluation that is a number of tokens, not a rate."""
VALIDATION_COUNTS = frozenset({"num_tasks", "failed_grades", "pass@1_ci95"})
"""Measures of an evaluation that are counts and intervals, not results: kept in the files, not drawn."""
TIMING_PREFIX = "timing_s/"
WHOLE_STEP = "step"
"""The phase that encloses all others, so it is left out where phases are added up."""


def timing(phase: str) -> str:
    """The metric that holds a phase's seconds: ``timing_s/gen`` for ``gen``."""
    return TIMING_PREFIX + phase


def idle_share(data_rank: int) -> str:
    """The metric of one data-parallel rank: ``perf/rollout_idle_share/rank_0``."""
    return f"{ROLLOUT_IDLE_SHARE}/rank_{data_rank}"


def split_validation(name: str) -> tuple[str, str] | None:
    """``(environment, measure)`` of an evaluation metric, or ``None`` for any other metric."""
    if not name.startswith(VALIDATION_PREFIX):
        return None
    environment, _, measure = name.removeprefix(VALIDATION_PREFIX).rpartition("/")
    return environment, measure
