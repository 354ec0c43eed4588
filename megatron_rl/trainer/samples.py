"""Graded groups to training samples: rewards of the whole step; groups without signal are left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megatron_rl.algorithms import StepRewards
from megatron_rl.algorithms.agents import AgentRows
from megatron_rl.algorithms.batch import Sample
from megatron_rl.algorithms.extension import Baseline
from megatron_rl.algorithms.groups import informative_groups
from megatron_rl.algorithms.turns import Row, StepTurns
from megatron_rl.errors import ConfigError
from megatron_rl.platform.collectives import gather_vectors
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.parts import Part, parts_of
from megatron_rl.types import Branch, Completion, RolloutGroup


@dataclass(frozen=True)
class SampleBuilder:
    """Gathers the rewards of all groups of the step from all ranks, as input of the advantages.

    A few bytes per sample, so that advantages across groups are the same on one rank and on many. Samples are numbered
    as on one rank, so a step is also split into the same updates.
    """

    baseline: Baseline
    keep_groups_without_signal: bool
    groups: ParallelGroups
    masks_truncated: bool = False
    """Exclude truncated answers from the loss (overlong filtering of DAPO)."""
    reward_names: tuple[str, ...] = ()
    """For advantages with several rewards: ``reward`` (the grade's own) and metrics of the grades."""
    max_failed_share: float = 0.0
    """Share of grades that may lack one of these; their samples are masked like failed grades."""
    turn_discount: float | None = None
    """For rewards per turn; None: one reward per sample."""

    def build(
        self, rollouts: Sequence[RolloutGroup], numbers: Sequence[int], policy_version: int
    ) -> tuple[tuple[Sample, ...], StepRewards]:
        """Build this rank's training samples, and the rewards of all ranks; collective over the rollout replicas.

        A sample with several sequences becomes several `Sample`s with one number. It counts once among the rewards,
        with all its tokens, and as truncated if one sequence was. With several agents each one's part counts like this.
        ``numbers``: indices of this rank's groups among the G groups of the step, ascending, each on one rank; ranks
        may have different counts. ``policy_version``: of the current weights.

        Raises:
            ConfigError: on every rank; more grades than allowed lack one of the rewards.
        """
        parts = [(number, part) for number, group in zip(numbers, rollouts, strict=True) for part in parts_of(group)]
        rows = [
            (
                number, part.agent, part.first, part.reward or 0.0, part.reward is not None, part.num_written,
                part.truncated, *self._named(part),
            )
            for number, part in parts
        ]  # fmt: skip
        local = torch.tensor(rows, dtype=torch.float64).view(-1)
        table = torch.cat(gather_vectors(local, self.groups.rollout_group)).view(-1, 7 + len(self.reward_names))
        columns = table[table[:, 0].argsort(stable=True)].unbind(1)  # of all samples of the job, ordered by group
        tasks, rewards, valid = columns[0].long(), columns[3].float(), columns[4].bool()
        named = torch.stack(columns[7:], 1).float() if self.reward_names else None
        if named is not None:
            valid = self._whole(named, valid)
        sample_ids, group_index, agents = AgentRows.of(tasks, columns[1].long(), columns[2].long())
        own = torch.isin(tasks, torch.tensor(numbers, dtype=torch.int64)).nonzero()[:, 0].tolist()
        turns = self._turns([part for _, part in parts], own, group_index)
        rewarded = [rewards] if named is None else named.unbind(1)
        signal = torch.stack([informative_groups(self.baseline, one, valid, group_index) for one in rewarded]).any(0)
        if turns is not None:
            signal = turns.informative(self.baseline, valid, group_index)
        in_loss = valid & (signal[group_index] | self.keep_groups_without_signal)
        if self.masks_truncated:
            in_loss &= ~columns[6].bool()
        samples = tuple(
            sample
            for row, (_, part) in zip(own, parts, strict=True)
            if in_loss[row]
            for sample in _sequences(part, sample_ids[row], row, turns)
        )
        step = StepRewards(
            rewards, valid, group_index, signal, in_loss, columns[5].long(), named, policy_version, agents=agents
        )
        return samples, step if turns is None else replace(step, turns=turns.rewards(step, self.baseline))

    def _turns(self, parts: Sequence[Part], own: Sequence[int], group_index: torch.Tensor) -> StepTurns | None:
        """Gather the turns of the step's samples from all ranks; ``own``: this rank's rows. Collective."""
        if self.turn_discount is None:
            return None
        rows = [row for number, part in zip(own, parts, strict=True) for row in turn_rows(number, part)]
        local = torch.tensor(rows, dtype=torch.float64).view(-1)
        table = torch.cat(gather_vectors(local, self.groups.rollout_group)).view(-1, 5)
        return StepTurns.of(table.tolist(), group_index, self.turn_discount)

    def _named(self, part: Part) -> list[float]:
        known = {"reward": math.nan if part.reward is None else part.reward, **part.rollout.grade.metrics}
        return [known.get(name, math.nan) for name in self.reward_names]

    def _whole(self, parts: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """Return the ``valid`` samples that have all rewards, [N] bool."""
        for name, values in zip(self.reward_names, parts[valid].unbind(1), strict=True):
            missing = int(values.isnan().sum())
            if missing > self.max_failed_share * len(values):
                raise ConfigError([
                    f"--rl-advantage-args rewards={'+'.join(self.reward_names)}: {missing} of {len(values)} grades of "
                    f"this step have no metric {name!r}; name metrics that all grades of all environments have"
                ])
        return valid & ~parts.isnan().any(1)


def _sequences(part: Part, sample_id: int, row: int, turns: StepTurns | None) -> list[Sample]:
    """Return the sequences with tokens; if there are any, also the first one, which represents the sample."""
    if not any(sequence.completion.token_ids for sequence in part.sequences):
        return []
    samples = [
        (_sample(number, sequence, part, sample_id), sequence)
        for number, sequence in enumerate(part.sequences, start=part.first)
        if number == part.first or sequence.completion.token_ids
    ]
    if turns is None:
        return [sample for sample, _ in samples]
    return [
        replace(sample, turn=turn_of_tokens(sequence, turns.index[row, sample.sequence]))
        for sample, sequence in samples
    ]


def _sample(number: int, sequence: Branch, part: Part, sample_id: int) -> Sample:
    completion, prompt = sequence.completion, len(sequence.prompt_ids)
    versions, counts = (torch.tensor(column) for column in zip(*completion.stretches, strict=True))
    counts[0] += prompt
    mask = torch.arange(prompt + len(completion.token_ids)) >= prompt
    for start, end in completion.environment_spans:
        mask[prompt + start : prompt + end] = False
    return Sample(
        token_ids=torch.tensor(sequence.prompt_ids + completion.token_ids), loss_mask=mask,
        inference_logprobs=torch.tensor((0.0,) * prompt + completion.inference_logprobs),
        versions=versions.repeat_interleave(counts), routing=completion.routing, reward=part.reward,
        sample_id=sample_id, sequence=number, first_sequence=part.first,
        tokens_elsewhere=part.num_written - completion.num_written, truncated=completion.finish_reason == "length",
    )  # fmt: skip


def turn_rows(row: int, part: Part) -> list[Row]:
    """List the turns of all sequences; without turn rewards the last turn of each gets the sample's reward."""
    rows = []
    for number, sequence in enumerate(part.sequences, start=part.first):
        counts = [end - start for start, end in turn_spans(sequence.completion)]
        rewards = sequence.completion.turn_rewards or (*[0.0] * (len(counts) - 1), part.reward or 0.0)
        rows += [(row, number, turn, *pair) for turn, pair in enumerate(zip(rewards, counts, strict=True))]
    return rows


def turn_of_tokens(sequence: Branch, first: int) -> torch.Tensor:
    """Number the turns of a sequence from ``first``: [L] int64, -1 for tokens that the policy did not write."""
    prompt, completion = len(sequence.prompt_ids), sequence.completion
    turns = torch.full((prompt + len(completion.token_ids),), -1)
    for number, (start, end) in enumerate(turn_spans(completion), start=first):
        turns[prompt + start : prompt + end] = number
    return turns


def turn_spans(completion: Completion) -> list[tuple[int, int]]:
    """List the ``[start, end)`` of the turns, i.e. of the tokens between environment messages."""
    edges = [0, *(edge for span in completion.environment_spans for edge in span), len(completion.token_ids)]
    return list(zip(edges[::2], edges[1::2], strict=True))


def reward_metrics(step: StepRewards) -> dict[str, float]:
    """Return reward metrics and the share of groups with signal, under verl's names."""
    signal, rewards = float(step.informative.sum()), step.rewards[step.valid]
    metrics = {
        "training/groups_with_signal": signal,
        "training/signal_share": signal / max(step.informative.numel(), 1),
        "training/failed_grades": float((~step.valid).sum()),
    }
    if rewards.numel():
        mean = rewards.mean().item()
        metrics |= {
            # As in verl the score is the reward before a KL penalty, which here is part of the loss.
            "critic/score/mean": mean,
            "critic/rewards/mean": mean,
            "critic/rewards/max": rewards.max().item(),
            "critic/rewards/min": rewards.min().item(),
        }
    return metrics
