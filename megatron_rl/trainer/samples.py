"""Graded groups to training samples: advantages over the whole step, groups without signal left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_rl.algorithms.groups import groups_with_signal
from megatron_rl.algorithms.interfaces import AdvantageConfig, AdvantageMethod
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
    looks beyond its own group gives the same numbers on one rank and on many. Samples are numbered
    as one rank would number them, so the updates a step is cut into are the same ones, too.
    """

    def __init__(
        self,
        advantage: AdvantageMethod,
        settings: AdvantageConfig,
        keep_groups_without_signal: bool,
        groups: ParallelGroups,
    ) -> None:
        self._advantage = advantage
        self._settings = settings
        self._keep_all = keep_groups_without_signal
        self._groups = groups

    def build(self, rollouts: Sequence[RolloutGroup], numbers: Sequence[int]) -> StepSamples:
        """Collective over the data-parallel group.

        ``numbers`` are those of this rank's groups among the G groups of the step, ascending: 0 .. G - 1, each on one
        rank, and not the same number of them on every rank.
        """
        group_index, rewards, valid = self._gather(rollouts, numbers)
        if not group_index.numel():
            return StepSamples((), 0, 0, 0, 0, rewards, rewards)
        advantages = self._advantage.compute(rewards, valid, group_index, self._settings)
        signal = groups_with_signal(self._advantage.BASELINE, rewards, valid, group_index)
        used = valid & (signal[group_index] | self._keep_all)
        own_ids = torch.isin(group_index, torch.tensor(numbers, dtype=torch.int64)).nonzero()[:, 0]
        return StepSamples(
            samples=_samples(rollouts, own_ids.tolist(), advantages.tolist(), used.tolist()),
            num_samples=rewards.numel(),
            num_failed=int((~valid).sum()),
            num_groups=group_index.unique().numel(),
            num_groups_with_signal=int(signal.sum()),
            rewards=rewards[valid],
            advantages=advantages[used],
        )

    def _gather(
        self, rollouts: Sequence[RolloutGroup], numbers: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Group, reward and validity of every sample of the job, each [B], ordered by group."""
        rows = [
            (number, r.grade.reward if r.grade.status == "ok" else 0.0, r.grade.status == "ok")
            for number, group in zip(numbers, rollouts, strict=True)
            for r in group.rollouts
        ]
        local = torch.tensor(rows, dtype=torch.float64).view(-1)
        table = torch.cat(gather_vectors(local, self._groups.data_group)).view(-1, 3)
        group_index, rewards, valid = table[table[:, 0].argsort(stable=True)].unbind(1)
        return group_index.long(), rewards.float(), valid.bool()


def _samples(
    rollouts: Sequence[RolloutGroup],
    sample_ids: Sequence[int],
    advantages: Sequence[float],
    used: Sequence[bool],
) -> tuple[Sample, ...]:
    """This rank's usable samples; ``sample_ids`` numbers all its rollouts in their order."""
    samples = []
    ids = iter(sample_ids)
    for group in rollouts:
        prompt = len(group.prompt_ids)
        for rollout in group.rollouts:
            sample_id, completion = next(ids), rollout.completion
            if used[sample_id] and completion.token_ids:
                samples.append(
                    Sample(
                        token_ids=torch.tensor(group.prompt_ids + completion.token_ids),
                        prompt_length=prompt,
                        advantage=advantages[sample_id],
                        inference_logprobs=torch.tensor((0.0,) * prompt + completion.inference_logprobs),
                        sample_id=sample_id,
                        environment_spans=tuple(
                            (prompt + start, prompt + end) for start, end in completion.environment_spans
                        ),
                    )
                )
    return tuple(samples)


def refuse_failures(samples: StepSamples, codes: dict[str, int], largest_share: float, example: str = "") -> None:
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
        + (f"; one of them: {example}" if example else "")
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
