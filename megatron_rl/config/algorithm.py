"""The reinforcement-learning algorithm."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from megatron_rl.config.flags import Added, Finding, flag, option, second, without_effect
from megatron_rl.errors import ConfigError
from megatron_rl.registry import ADVANTAGES, CORRECTIONS, FILTERS, LOSSES, Registry

if TYPE_CHECKING:
    from megatron_rl.config.rl_config import RLConfig


def _stated(kind: Registry, name: str, constant: str) -> Any:
    """Read a constant of an extension; None also where it cannot be read, as `preflight` imports it and says why."""
    with contextlib.suppress(ConfigError):
        return kind.stated(name, constant)
    return None


def _aggregation(config: RLConfig, _: int) -> str:
    return _stated(LOSSES, config.algorithm.rl_policy_loss, "AGGREGATION") or "token-mean"


def _correction(config: RLConfig, _: int) -> str:
    """Correct quantised rollouts and those by older weights: they are of another policy than the trainer's."""
    algorithm = config.algorithm
    if algorithm.has_stale_samples:
        return "token_tis"
    rounded = config.quantization.rl_rollout_quantization != "none" or config.kv_cache_is_rounded
    return "token_tis" if rounded else "none"


def _prompts_in_flight(config: RLConfig, _: int) -> int | None:
    prompts = config.algorithm.grpo_prompts_per_step
    return 2 * prompts if prompts and config.algorithm.rl_partial_rollouts else prompts


def _largest_staleness(config: RLConfig, _: int) -> float | None:
    return 3.0 if config.algorithm.rl_partial_rollouts else 1.0 if config.algorithm.has_stale_samples else None


_NO_CAP = Added("cap=1e9")
"""Above exp of the largest log-ratio, `algorithms.batch.LOG_RATIO_LIMIT`."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Groups, advantages, policy loss and importance-sampling corrections."""

    grpo_prompts_per_step: int | None = flag(
        None, ge=1, le=1_000_000, common=True, needed=("--perform-rl-step samples that many prompts", "64")
    )
    """Prompts per step, e.g. 64 (Megatron's default: 32)."""
    grpo_group_size: int | None = flag(
        None, ge=1, le=100_000, common=True, needed=("--perform-rl-step compares completions within a group", "16")
    )
    """Completions per prompt (TRL's num_generations), e.g. 16 (Megatron's default: 2)."""
    grpo_iterations: int = flag(1, ge=1, le=1000)
    """Passes over each rollout (Megatron's default: 2)."""
    grpo_kl_beta: float = flag(0.0, ge=0, le=1000)
    """Coefficient of the KL penalty, e.g. 0.001; 0 also saves the reference model's forward pass (Megatron's default:
    0.001)."""
    grpo_entropy_term_weight: float = flag(0.0, ge=-100, le=100)
    """Coefficient of the entropy bonus, e.g. 0.001."""
    rl_advantage: str = flag("grpo", names_of=ADVANTAGES)
    """Advantage estimator: relative to the group, to the whole step, or to a critic (gae). A name or file.py:NAME."""
    rl_advantage_args: tuple[str, ...] = flag((), aliases=(
        option("--rl-gamma", "rl_advantage_args", "gamma", ge=0, le=1),
        option("--rl-gae-lambda", "rl_advantage_args", "gae_lambda", ge=0, le=1),
    ))  # fmt: skip
    """Options of the advantage estimator, e.g. lowest=-1. GAE has two of them: --rl-gamma, the discount factor per
    token (default 1), and --rl-gae-lambda, where 0 uses only the critic's values, 1 only observed rewards (default
    1)."""
    rl_turn_discount: float | None = flag(None, ge=0, le=1)
    """Rewards by turn, e.g. 0.9: discount of the return from turn to turn; each turn has its own advantage. Default:
    off, every token has the sum of the sample's rewards."""
    rl_policy_loss: str = flag("clip", names_of=LOSSES)
    """Policy loss: a name or file.py:NAME."""
    rl_policy_loss_args: tuple[str, ...] = flag((), aliases=(
        option("--grpo-clamp-eps-lower", "rl_policy_loss_args", "clamp_eps_lower", gt=0, le=1),
        option("--grpo-clamp-eps-upper", "rl_policy_loss_args", "clamp_eps_upper", gt=0),
        option("--rl-dual-clip", "rl_policy_loss_args", "dual_clip", gt=1),
    ))  # fmt: skip
    """Options of the policy loss, e.g. tau_pos=1 tau_neg=1.05. The probability ratio is clipped between 1 -
    --grpo-clamp-eps-lower, e.g. 0.2, where 1 means no lower clip, and 1 + --grpo-clamp-eps-upper, e.g. 0.28. Defaults
    of the losses: clip and clip_cov 0.2 and 0.2, cispo 1 and 0.2, gspo 3e-4 and 4e-4; kl_cov and sapo do not clip.
    --rl-dual-clip (Ye et al., 2020) caps the loss of negative advantages at this multiple, e.g. 3 (default: off)."""
    rl_kl_estimator: Literal["k1", "k2", "k3"] = flag("k3")
    """Estimator of the KL to the reference model."""
    rl_correction: str | None = flag(
        None, names_of=CORRECTIONS, derived=_correction, aliases=(
            second("--rl-inference-logprobs-is-correction", bool,
                   lambda _: {"rl_correction": "token_tis", "rl_correction_args": _NO_CAP}),
        ),
    )  # fmt: skip
    """Importance-sampling correction of the rollout-trainer mismatch, e.g. token_tis; several are joined by +. Default:
    token_tis if rollouts are quantized, partial or kept (--rl-surplus keep), else none. Megatron's spelling is
    token_tis, uncapped unless a coefficient is given."""
    rl_correction_args: tuple[str, ...] = flag((), aliases=(
        option("--rl-correction-cap", "rl_correction_args", "cap", gt=0,
               aliases=("--rl-importance-sampling-truncation-coef",)),
        option("--rl-correction-lower", "rl_correction_args", "lower", ge=0, lt=1),
        option("--rl-correction-upper", "rl_correction_args", "upper", gt=1),
        option("--rl-correction-veto", "rl_correction_args", "veto", ge=1e-8, lt=1),
    ))  # fmt: skip
    """Options of the corrections: --rl-correction-cap, the largest importance weight of token_tis and sequence_tis
    (default 2); --rl-correction-lower and --rl-correction-upper, the smallest and largest ratio of trainer to rollout
    probability that masked_is (default 0.5 and 2) and geometric (default 0.99 and 1.01) accept; --rl-correction-veto:
    reject a sequence in which one token's ratio is smaller (default 1e-4)."""
    rl_loss_aggregation: Literal["token-mean", "sequence-mean", "constant"] | None = flag(
        None, derived=_aggregation,
        aliases=(second("--calculate-per-token-loss", bool, lambda _: {"rl_loss_aggregation": "token-mean"}),),
    )
    """Denominator of the loss over the global batch. Default of the policy loss: sequence-mean for gspo and sapo,
    token-mean for the others."""
    rl_keep_zero_variance_groups: bool = flag(False)
    """Keep zero-variance groups (all rewards equal) in the loss. By default they are dropped. With an advantage
    relative to the whole step, they are dropped only if all rewards of the step are equal."""
    rl_truncated: Literal["keep", "mask"] = flag("keep")
    """Completions cut at the length limit: keep them, or mask them out of the loss but not out of the baseline (DAPO's
    overlong filtering)."""
    rl_dynamic_sampling: bool = flag(False)
    """Dynamic sampling (DAPO): sample prompts until --grpo-prompts-per-step groups pass the filter."""
    rl_group_filter: str = flag("signal", names_of=FILTERS)
    """Filter of dynamic sampling: which groups to train on. signal keeps groups whose rewards differ. A name or
    file.py:NAME."""
    rl_group_filter_args: tuple[str, ...] = flag(())
    """Options of the filter, e.g. low=0.2 high=0.8."""
    rl_oversampling: int | None = flag(None, ge=1, le=1_000_000, derived=_prompts_in_flight)
    """Prompts in flight at once, e.g. 128, with --rl-dynamic-sampling (default: --grpo-prompts-per-step) or
    --rl-partial-rollouts (default: twice that)."""
    rl_max_refills: int = flag(10, ge=0, le=10_000)
    """Most resampling rounds per step of --rl-dynamic-sampling; then the step trains on the groups it has."""
    rl_surplus: Literal["drop", "keep"] = flag("drop")
    """What to do with extra groups of dynamic sampling: drop them and sample their prompts again later, or keep them
    for later steps, up to a staleness of --rl-generation-lag."""
    rl_partial_rollouts: bool = flag(False)
    """Train as soon as --grpo-prompts-per-step groups are finished. The others continue with the newer weights."""
    rl_generation_lag: float | None = flag(None, ge=-1, le=1000, derived=_largest_staleness)
    """Largest staleness of a sample in steps; rounded down (default: 3 with --rl-partial-rollouts, 1 with --rl-surplus
    keep, else 0)."""
    rl_stale_samples: Literal["finish", "drop"] = flag("finish")
    """Partial groups that reach --rl-generation-lag: finish them first, or drop them, which favors short
    completions."""

    @property
    def has_stale_samples(self) -> bool:
        """Whether a step may train on tokens that older weights drew."""
        return self.rl_partial_rollouts or self.rl_surplus == "keep"


def dynamic_sampling_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Report settings with which no group would ever count, or that nobody reads without dynamic sampling."""
    algorithm = config.algorithm
    if not algorithm.rl_dynamic_sampling:
        names = {"rl_group_filter", "rl_group_filter_args", "rl_max_refills", "rl_surplus"}
        names |= set() if algorithm.rl_partial_rollouts else {"rl_oversampling"}
        yield from without_effect(config, names, "--rl-dynamic-sampling; add it, or leave this out")
        return
    if algorithm.grpo_group_size == 1 and ":" not in algorithm.rl_group_filter:
        yield "grpo_group_size", (
            "with --rl-dynamic-sampling: the reward of one completion differs from no other; use 2 or more"
        )
    if algorithm.rl_keep_zero_variance_groups:
        text = "with --rl-dynamic-sampling, which replaces groups of equal rewards by others; leave one of them out"
        yield "rl_keep_zero_variance_groups", text
    wanted, started = algorithm.grpo_prompts_per_step, algorithm.rl_oversampling
    if wanted and started and started < wanted and not algorithm.rl_partial_rollouts:
        yield "rl_oversampling", f"is less than --grpo-prompts-per-step {wanted}; use {wanted} or more"


def partial_rollout_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Report partial rollouts that would never happen, or that could not be continued."""
    algorithm, flag_name = config.algorithm, "--rl-partial-rollouts"
    lag = algorithm.rl_generation_lag
    if algorithm.has_stale_samples and int(lag) < 1:
        which = flag_name if algorithm.rl_partial_rollouts else "--rl-surplus keep"
        yield "rl_generation_lag", f"with {which}: what is left for the next step would be too old; use 1 or more"
    if not algorithm.rl_partial_rollouts:
        if (lag or 0) > 0 and not algorithm.has_stale_samples:
            yield "rl_generation_lag", f"has no effect without {flag_name} or --rl-surplus keep; add one, or use 0"
        yield from without_effect(config, ["rl_stale_samples"], f"{flag_name}; add it, or leave this out")
        return
    for is_on, name, why in (
        (algorithm.rl_surplus == "keep", "--rl-surplus keep", "which it does not need: extra groups wait anyway"),
        (config.stages.count > 1 and (config.parallel.expert_model_parallel_size or 1) > 1,
         "--expert-model-parallel-size over pipeline stages", "where no copy of the model may stop before the others"),
    ):  # fmt: skip
        if is_on:
            yield "rl_partial_rollouts", f"with {name}, {why}; leave one of them out"
    wanted, at_once = algorithm.grpo_prompts_per_step, algorithm.rl_oversampling
    if wanted and at_once <= wanted:
        text = f"with {flag_name} is not more than --grpo-prompts-per-step {wanted}; use {wanted + 1} or more"
        yield "rl_oversampling", text
    elif wanted and lag >= 1 and algorithm.rl_stale_samples == "finish" and at_once > wanted * (int(lag) + 1):
        yield "rl_oversampling", (
            f"is more than {int(lag) + 1} steps of {wanted} groups can finish in time (--rl-generation-lag {lag:g}); "
            f"use at most {wanted * (int(lag) + 1)}, or --rl-stale-samples drop"
        )


def baseline_of(config: RLConfig) -> str:
    """Return what the advantage compares with, read from its file: ``group``, ``batch`` or ``critic``."""
    return _stated(ADVANTAGES, config.algorithm.rl_advantage, "BASELINE") or "group"


def algorithm_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Report settings that the advantage and the loss, read from their files, do not take."""
    algorithm = config.algorithm
    reads_rewards = not (config.wants_teacher and config.teacher.rl_reward_weight == 0)
    compares_groups = baseline_of(config) == "group" and reads_rewards
    if config.training.perform_rl_step and algorithm.grpo_group_size == 1 and compares_groups:
        yield "grpo_group_size", (
            f": the advantage {algorithm.rl_advantage} compares the completions of one prompt, and one alone has none; "
            "use 2 or more, or --rl-advantage gae, batch_norm or reinforce_plus_plus"
        )
    if algorithm.rl_turn_discount is not None and _stated(ADVANTAGES, algorithm.rl_advantage, "BY_TURN") is False:
        yield "rl_turn_discount", (
            f"with --rl-advantage {algorithm.rl_advantage}, which is defined for the reward of a whole sample; use "
            "grpo, dr_grpo, rloo, gae or another one, or leave it out"
        )
