"""Rewards by turn (--rl-turn-discount): returns of turns, and batches with turn-level advantages.

Two samples of a task, of two turns and of one, with a discount of 0.5::

    rewards of turns     1  2  |  4
    returns              2  2  |  4        1 + 0.5 x 2
    groups               0  1  |  0        turns with the same number; the second turn is alone

The return is that of GTPO (arXiv 2511.14846); turns of one number are compared as in MT-GRPO (arXiv 2505.11821), which
compares their rewards. Rewards at the last tokens of turns for a critic are MT-PPO (arXiv 2505.11821).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.algorithms.batch import StepRewards, TokenBatch, TurnRewards
from megatron_rl.algorithms.extension import Baseline
from megatron_rl.algorithms.groups import informative_groups

Row = tuple[int, int, int, float, int]
"""A turn: sample in the step, sequence in the sample, turn number, reward, loss tokens."""


@dataclass(frozen=True)
class StepTurns:
    """The turns of all ranks ordered by sample, sequence and number; on the CPU."""

    sample: Tensor
    """[M] int64: the sample of each turn."""
    group: Tensor
    """[M] int64: comparison group of each turn, see `TurnRewards`."""
    own: Tensor
    """[M] fp32."""
    returns: Tensor
    """[M] fp32: ``own`` plus the discounted return of the sequence's next turn."""
    loss_tokens: Tensor
    """[M] int64."""
    index: dict[tuple[int, int], int]
    """(sample, sequence) -> index of its first turn."""
    discount: float

    @classmethod
    def of(cls, rows: Sequence[Row], group_index: Tensor, discount: float) -> StepTurns:
        """Order ``rows`` and compute returns; ``group_index`` [N]: the task of each sample."""
        rows = sorted((int(s), int(b), int(t), reward, int(tokens)) for s, b, t, reward, tokens in rows)
        returns, following = [0.0] * len(rows), 0.0
        for place in reversed(range(len(rows))):
            goes_on = place + 1 < len(rows) and rows[place + 1][:2] == rows[place][:2]
            following = rows[place][3] + (discount * following if goes_on else 0.0)
            returns[place] = following
        tasks = group_index.tolist()
        keys = [(tasks[sample], number) for sample, _, number, _, _ in rows]
        numbers = {key: number for number, key in enumerate(sorted(set(keys)))}
        return cls(
            torch.tensor([row[0] for row in rows], dtype=torch.int64),
            torch.tensor([numbers[key] for key in keys], dtype=torch.int64),
            torch.tensor([row[3] for row in rows]), torch.tensor(returns),
            torch.tensor([row[4] for row in rows], dtype=torch.int64),
            {row[:2]: place for place, row in enumerate(rows) if row[2] == 0}, discount,
        )  # fmt: skip

    def informative(self, baseline: Baseline, valid: Tensor, group_index: Tensor) -> Tensor:
        """Return which tasks have a turn with a possibly nonzero advantage: [tasks] bool."""
        turns = informative_groups(baseline, self.returns, valid[self.sample], self.group)
        found = torch.zeros(int(group_index.max()) + 1 if group_index.numel() else 0, dtype=torch.bool)
        return found.index_fill(0, group_index[self.sample[turns[self.group]]], True)

    def rewards(self, step: StepRewards, baseline: Baseline) -> TurnRewards:
        """Return the rewards by turn for the samples of ``step``."""
        valid = step.valid[self.sample]
        return TurnRewards(
            self.returns, valid, self.group, informative_groups(baseline, self.returns, valid, self.group),
            step.in_loss[self.sample], self.loss_tokens, policy_version=step.policy_version, own=self.own,
            discount=self.discount,
        )  # fmt: skip


def by_turn(batch: TokenBatch) -> TokenBatch:
    """Return ``batch`` with turns instead of samples, and rewards at their last tokens; unchanged without turn rewards.
    """
    turns = None if batch.step is None else batch.step.turns
    if turns is None or batch.samples.turn is None:
        return batch
    number, places = batch.samples.turn, torch.arange(batch.loss_mask.numel(), device=batch.loss_mask.device)
    # Tokens without loss share one additional index.
    ends = torch.full((turns.own.numel() + 1,), -1, device=places.device)
    ends = ends.scatter_reduce(0, number % len(ends), torch.where(number < 0, -1, places), "amax")
    judged = replace(batch, step=turns)
    rewards = torch.where(ends[number] == places, judged.of_samples(turns.own), 0.0)
    return replace(judged, rewards=rewards)
