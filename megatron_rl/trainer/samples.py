"""Graded groups to training samples: advantages over the whole step, groups without signal left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_rl.algorithms.groups import groups_with_signal
from megatron_rl.algorithms.interfaces import AdvantageConfig, AdvantageFunction
from megatron_rl.errors import EnvironmentFault
from megatron_rl.parallel import ParallelGroups
from megatron_rl.parallel.collectives import gather_vectors
from megatron_rl.types import RolloutGroup, Sample


@dataclass(frozen=True)
class StepSamples:
    """What one rollout offers for training, and how much of it was usable. Counts are global."""

    samples: tuple[Sample, ...]
    """This data-parallel rank's samples; ids are unique over the job."""
    num_samples: int
    num_failed: int
    """Samples whose grade failed: masked from baseline and loss."""
    num_groups: int
    num_groups_with_signal: int
    rewards: torch.Tensor
    """[graded samples] fp32, of all ranks."""
    advantages: torch.Tensor
    """[samples in the loss] fp32, of all ranks."""


class SampleBuilder:
    """Computes advantages over all groups of the step, wherever they were generated.

    Rewards are gathered from all data-parallel ranks (a few bytes a sample), so an advantage that
    looks beyond its own group gives the same numbers on one rank and on many.
    """

    def __init__(
        self,
        advantage: AdvantageFunction,
        settings: AdvantageConfig,
        keep_groups_without_signal: bool,
        groups: ParallelGroups,
    ) -> None:
        self._advantage = advantage
        self._settings = settings
        self._keep_all = keep_groups_without_signal
        self._groups = groups

    def build(self, rollouts: Sequence[RolloutGroup]) -> StepSamples:
        """Collective over the data-parallel group."""
        rewards = _column(rollouts, lambda grade: grade.reward if grade.status == "ok" else 0.0)
        valid = _column(rollouts, lambda grade: float(grade.status == "ok")).bool()
        sizes = torch.tensor([len(group.rollouts) for group in rollouts])
        local_groups = torch.repeat_interleave(torch.arange(len(rollouts)), sizes)

        data_group = self._groups.data_group
        all_rewards = torch.cat(gather_vectors(rewards, data_group))
        all_valid = torch.cat(gather_vectors(valid.to(torch.uint8), data_group)).bool()
        group_counts = [int(c) for c in torch.cat(gather_vectors(torch.tensor([len(rollouts)]), data_group))]
        first_group = sum(group_counts[: self._groups.data_rank])
        all_groups = torch.cat(gather_vectors(local_groups + first_group, data_group))
        if all_rewards.numel() == 0:
            return StepSamples((), 0, 0, 0, 0, all_rewards, all_rewards)

        advantages = self._advantage(all_rewards, all_valid, all_groups, self._settings)
        signal = groups_with_signal(all_rewards, all_valid, all_groups)
        used = all_valid & (signal[all_groups] | self._keep_all)
        sample_counts = torch.cat(gather_vectors(torch.tensor([rewards.numel()]), data_group))
        first_sample = int(sample_counts[: self._groups.data_rank].sum())
        return StepSamples(
            samples=_samples(rollouts, advantages, used, first_sample),
            num_samples=all_rewards.numel(),
            num_failed=int((~all_valid).sum()),
            num_groups=sum(group_counts),
            num_groups_with_signal=int(signal.sum()),
            rewards=all_rewards[all_valid],
            advantages=advantages[used],
        )


def _column(rollouts: Sequence[RolloutGroup], read) -> torch.Tensor:
    values = [read(rollout.grade) for group in rollouts for rollout in group.rollouts]
    return torch.tensor(values, dtype=torch.float32)


def _samples(
    rollouts: Sequence[RolloutGroup], advantages: torch.Tensor, used: torch.Tensor, first: int
) -> tuple[Sample, ...]:
    samples = []
    sample_id = first
    for group in rollouts:
        prompt = len(group.prompt_ids)
        for rollout in group.rollouts:
            completion = rollout.completion
            if used[sample_id] and completion.token_ids:
                samples.append(
                    Sample(
                        token_ids=torch.tensor(group.prompt_ids + completion.token_ids),
                        prompt_length=prompt,
                        advantage=float(advantages[sample_id]),
                        inference_logprobs=torch.tensor((0.0,) * prompt + completion.inference_logprobs),
                        sample_id=sample_id,
                    )
                )
            sample_id += 1
    return tuple(samples)


def refuse_failures(samples: StepSamples, codes: dict[str, int], largest_share: float) -> None:
    """Stop the run when too many grades failed.

    Raises:
        EnvironmentFault: more than ``largest_share`` of the step's samples have no grade.
    """
    if samples.num_failed <= largest_share * samples.num_samples:
        return
    counts = ", ".join(f"{code} {count}" for code, count in codes.items())
    raise EnvironmentFault(
        f"{samples.num_failed} of {samples.num_samples} grades failed ({counts}), more than the "
        f"{largest_share:.0%} allowed; see logs/ of the run directory, or raise --rl-max-failed-share"
    )


def reward_metrics(samples: StepSamples) -> dict[str, float]:
    """Rewards, advantages and how much of the rollout carries a signal, under verl's names."""
    rewards, advantages = samples.rewards, samples.advantages
    metrics = {
        "training/groups_with_signal": float(samples.num_groups_with_signal),
        "training/signal_share": samples.num_groups_with_signal / max(samples.num_groups, 1),
        "training/failed_grades": float(samples.num_failed),
    }
    if rewards.numel():
        metrics |= {
            "critic/rewards/mean": rewards.mean().item(),
            "critic/rewards/max": rewards.max().item(),
            "critic/rewards/min": rewards.min().item(),
            "critic/score/mean": (rewards > 0).float().mean().item(),
        }
    if advantages.numel():
        metrics |= {
            "critic/advantages/mean": advantages.mean().item(),
            "critic/advantages/max": advantages.max().item(),
            "critic/advantages/min": advantages.min().item(),
        }
    return metrics
