"""Graded groups to training samples: rewards of the whole step, groups without signal left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megatron_rl.algorithms import StepRewards
from megatron_rl.algorithms.batch import Sample
from megatron_rl.algorithms.extension import Baseline
from megatron_rl.algorithms.groups import informative_groups
from megatron_rl.algorithms.turns import Row, StepTurns
from megatron_rl.errors import ConfigError
from megatron_rl.platform.collectives import gather_vectors
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.types import Branch, Completion, Grade, Rollout, RolloutGroup


@dataclass(frozen=True)
class SampleBuilder:
    """Gathers the rewards of all groups of the step, wherever they were generated: what advantages are made of.

    That is a few bytes a sample, so an advantage that looks beyond its own group gives the same numbers on one rank and
    on many. Samples are numbered as one rank would number them, so a step is cut into the same updates, too.
    """

    baseline: Baseline
    keep_groups_without_signal: bool
    groups: ParallelGroups
    masks_truncated: bool = False
    """Leaves answers that were cut at their length limit out of the loss (overlong filtering of DAPO)."""
    reward_names: tuple[str, ...] = ()
    """Of an advantage that takes several rewards: ``reward``, the grade's own, and metrics of the grades."""
    max_failed_share: float = 0.0
    """Of the grades that may lack one of them: their samples are masked like those whose grade has failed."""
    turn_discount: float | None = None
    """Of rewards by turn; None: a sample has one reward."""

    def build(
        self, rollouts: Sequence[RolloutGroup], numbers: Sequence[int], policy_version: int
    ) -> tuple[tuple[Sample, ...], StepRewards]:
        """Build this rank's samples for training, and the rewards of all; collective over the rollout replicas.

        A sample of several sequences is several `Sample`s of one number. It counts once among the rewards: with all its
        tokens, and as truncated where one of its sequences was.

        ``numbers`` are those of this rank's groups among the G groups of the step, ascending: 0 .. G - 1, each on one
        rank, and not the same number of them on every rank. ``policy_version`` is that of the weights now.

        Raises:
            ConfigError: on every rank; of more grades than may fail one of the rewards is missing.
        """
        rows = [
            (
                number, 0.0 if r.grade.failed else r.grade.reward, not r.grade.failed, r.num_written, r.truncated,
                *self._parts(r.grade),
            )
            for number, group in zip(numbers, rollouts, strict=True)
            for r in group.rollouts
        ]
        local = torch.tensor(rows, dtype=torch.float64).view(-1)
        table = torch.cat(gather_vectors(local, self.groups.rollout_group)).view(-1, 5 + len(self.reward_names))
        columns = table[table[:, 0].argsort(stable=True)].unbind(1)  # of all samples of the job, ordered by group
        group_index, rewards, valid = columns[0].long(), columns[1].float(), columns[2].bool()
        parts = torch.stack(columns[5:], 1).float() if self.reward_names else None
        if parts is not None:
            valid = self._whole(parts, valid)
        own = torch.isin(group_index, torch.tensor(numbers, dtype=torch.int64)).nonzero()[:, 0].tolist()
        rolled = [(group, rollout) for group in rollouts for rollout in group.rollouts]
        turns = self._turns([rollout for _, rollout in rolled], own, group_index)
        rewarded = [rewards] if parts is None else parts.unbind(1)
        signal = torch.stack([informative_groups(self.baseline, one, valid, group_index) for one in rewarded]).any(0)
        if turns is not None:
            signal = turns.informative(self.baseline, valid, group_index)
        in_loss = valid & (signal[group_index] | self.keep_groups_without_signal)
        truncated = columns[4].bool()
        if self.masks_truncated:
            in_loss &= ~truncated
        samples = tuple(
            sample
            for sample_id, (group, rollout) in zip(own, rolled, strict=True)
            if in_loss[sample_id]
            for sample in _sequences(group, rollout, sample_id, turns)
        )
        step = StepRewards(rewards, valid, group_index, signal, in_loss, columns[3].long(), parts, policy_version)
        return samples, step if turns is None else replace(step, turns=turns.rewards(step, self.baseline))

    def _turns(self, rollouts: Sequence[Rollout], own: Sequence[int], group_index: torch.Tensor) -> StepTurns | None:
        """The turns of the step's samples, of all ranks; ``own`` are the numbers of this rank's. Collective."""
        if self.turn_discount is None:
            return None
        rows = [row for number, rollout in zip(own, rollouts, strict=True) for row in turn_rows(number, rollout)]
        local = torch.tensor(rows, dtype=torch.float64).view(-1)
        table = torch.cat(gather_vectors(local, self.groups.rollout_group)).view(-1, 5)
        return StepTurns.of(table.tolist(), group_index, self.turn_discount)

    def _parts(self, grade: Grade) -> list[float]:
        known = {"reward": math.nan if grade.failed else grade.reward, **grade.metrics}
        return [known.get(name, math.nan) for name in self.reward_names]

    def _whole(self, parts: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """[N] bool: the ``valid`` samples that have all rewards."""
        for name, values in zip(self.reward_names, parts[valid].unbind(1), strict=True):
            missing = int(values.isnan().sum())
            if missing > self.max_failed_share * len(values):
                raise ConfigError([
                    f"--rl-advantage-args rewards={'+'.join(self.reward_names)}: {missing} of {len(values)} grades of "
                    f"this step have no metric {name!r}; name metrics that all grades of all environments have"
                ])
        return valid & ~parts.isnan().any(1)


def _sequences(group: RolloutGroup, rollout: Rollout, sample_id: int, turns: StepTurns | None) -> list[Sample]:
    """Those that have tokens; the first one also without, where another has some: it stands for the sample."""
    if not any(completion.token_ids for completion in rollout.completions):
        return []
    samples = [
        (_sample(number, sequence, rollout, sample_id), sequence)
        for number, sequence in enumerate(group.sequences(rollout))
        if number == 0 or sequence.completion.token_ids
    ]
    if turns is None:
        return [sample for sample, _ in samples]
    return [
        replace(sample, turn=turn_of_tokens(sequence, turns.index[sample_id, sample.sequence]))
        for sample, sequence in samples
    ]


def _sample(number: int, sequence: Branch, rollout: Rollout, sample_id: int) -> Sample:
    completion, prompt = sequence.completion, len(sequence.prompt_ids)
    versions, counts = (torch.tensor(column) for column in zip(*completion.stretches, strict=True))
    counts[0] += prompt
    mask = torch.arange(prompt + len(completion.token_ids)) >= prompt
    for start, end in completion.environment_spans:
        mask[prompt + start : prompt + end] = False
    return Sample(
        token_ids=torch.tensor(sequence.prompt_ids + completion.token_ids),
        loss_mask=mask,
        inference_logprobs=torch.tensor((0.0,) * prompt + completion.inference_logprobs),
        versions=versions.repeat_interleave(counts),
        routing=completion.routing,
        reward=rollout.grade.reward,
        sample_id=sample_id,
        sequence=number,
        tokens_elsewhere=rollout.num_written - completion.num_written,
        truncated=completion.finish_reason == "length",
    )


def turn_rows(sample_id: int, rollout: Rollout) -> list[Row]:
    """List the turns of all sequences; where no turn has a reward, the last of each has the sample's."""
    rows = []
    for number, completion in enumerate(rollout.completions):
        counts = [end - start for start, end in written(completion)]
        reward = 0.0 if rollout.grade.failed else rollout.grade.reward
        rewards = completion.turn_rewards or (*[0.0] * (len(counts) - 1), reward)
        rows += [(sample_id, number, turn, *pair) for turn, pair in enumerate(zip(rewards, counts, strict=True))]
    return rows


def turn_of_tokens(sequence: Branch, first: int) -> torch.Tensor:
    """Number the turns of a sequence from ``first`` on: [L] int64, -1 where the policy did not write."""
    prompt, completion = len(sequence.prompt_ids), sequence.completion
    turns = torch.full((prompt + len(completion.token_ids),), -1)
    for number, (start, end) in enumerate(written(completion), start=first):
        turns[prompt + start : prompt + end] = number
    return turns


def written(completion: Completion) -> list[tuple[int, int]]:
    """List ``[start, end)`` of the turns, which lie around what the model read."""
    edges = [0, *(edge for span in completion.environment_spans for edge in span), len(completion.token_ids)]
    return list(zip(edges[::2], edges[1::2], strict=True))


def reward_metrics(step: StepRewards) -> dict[str, float]:
    """Return rewards, and how much of the rollout carries a signal, under verl's names."""
    signal, rewards = float(step.informative.sum()), step.rewards[step.valid]
    metrics = {
        "training/groups_with_signal": signal,
        "training/signal_share": signal / max(step.informative.numel(), 1),
        "training/failed_grades": float((~step.valid).sum()),
    }
    if rewards.numel():
        mean = rewards.mean().item()
        metrics |= {
            # As in verl: the score is the reward before a KL penalty, which here is a term of the loss.
            "critic/score/mean": mean,
            "critic/rewards/mean": mean,
            "critic/rewards/max": rewards.max().item(),
            "critic/rewards/min": rewards.min().item(),
        }
    return metrics
