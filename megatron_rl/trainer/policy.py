"""All optimizer updates that one rollout pays for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_rl.algorithms import StepRewards, TokenBatch
from megatron_rl.algorithms.extension import Function
from megatron_rl.algorithms.kl import with_kl_in_reward
from megatron_rl.algorithms.objective import MicroLoss, PolicyObjective, objective_metrics
from megatron_rl.algorithms.turns import by_turn
from megatron_rl.metrics.timers import PhaseTimer
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.models.lora import without_adapters
from megatron_rl.platform.collectives import gather_vectors
from megatron_rl.quantization.rollout import RolloutQuantization
from megatron_rl.trainer.critic import Critic, value_metrics, whitened
from megatron_rl.trainer.optimizer import Optimization, UpdateOutcome
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.trainer.teacher import Teacher
from megatron_rl.trainer.update import Loss, TrainOutcome, Updates, outcome_metrics


class ReferencePolicy:
    """The frozen policy of the KL penalty: a host copy of the first weights, swapped in for a while.

    Values move, storage does not: optimizer buffers and captured graphs keep pointing at the
    parameters. While the reference is in, the policy's own values wait on the host, and they come
    back bit for bit.
    """

    def __init__(self, policy: PolicyModel, copies: RolloutQuantization | None = None) -> None:
        """``copies`` of the weights hear of every exchange: aligned training runs on them."""
        self._copies = copies
        self._parameters = list(policy.parameters())
        self._frozen = self._on_host()

    @contextlib.contextmanager
    @torch.no_grad()
    def swapped_in(self) -> Iterator[None]:
        """Put the reference weights into the model inside the ``with`` block."""
        own = self._on_host()
        self._write(self._frozen)
        try:
            yield
        finally:
            self._write(own)

    def _on_host(self) -> list[torch.Tensor]:
        """Copies of the values, of a GPU's in pinned memory: from pageable memory a copy is several times as slow."""
        copies = []
        for parameter in self._parameters:
            copy = torch.empty_like(parameter, device="cpu", pin_memory=parameter.is_cuda)
            copies.append(copy.copy_(parameter.detach(), non_blocking=True))
        return copies

    def _write(self, values: list[torch.Tensor]) -> None:
        # What is copied to the host and back is ordered by the stream, and torch keeps pinned memory until then.
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.data.copy_(value, non_blocking=True)
        if self._copies is not None:
            self._copies.weights_changed()


class BasePolicy:
    """The reference of a policy that is adapters on a frozen base: the base, without a copy of its weights."""

    def __init__(self, policy: PolicyModel, copies: RolloutQuantization | None = None) -> None:
        """``copies`` as for `ReferencePolicy`."""
        self._policy, self._copies = policy, copies

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Switch the adapters off inside the ``with`` block."""
        try:
            with without_adapters(self._policy):
                self._tell_copies()
                yield
        finally:
            self._tell_copies()

    def _tell_copies(self) -> None:
        if self._copies is not None:
            self._copies.weights_changed()


@dataclass(frozen=True)
class PolicyTrainer:
    """Old and reference log-probs and values where they are needed, advantages, then the updates."""

    optimization: Optimization
    scorer: Scorer
    advantage: Function
    objective: PolicyObjective
    iterations: int
    timer: PhaseTimer
    reference: ReferencePolicy | BasePolicy | None = None
    """None without a KL penalty."""
    teacher: Teacher | None = None
    critic: Critic | None = None
    """None where the advantage needs none."""
    draws_exactly: bool = False
    """The log-probs of rollouts are those of the weights at the step's beginning, to the bit."""

    def step(self, updates: Updates, rewards: StepRewards, critic_alone: bool = False) -> TrainOutcome:
        """Go over the rollout's updates ``grpo_iterations`` times, first with the critic; collective.

        ``critic_alone`` leaves the policy as it is.
        """
        if not updates:
            return TrainOutcome({})
        scored = self._score(_each(updates, lambda batch: replace(batch, step=rewards)))
        groups, device = self.scorer.groups, self.scorer.device
        metrics = advantage_metrics(scored, groups.data_group)
        of_critic: list[UpdateOutcome] = []
        if self.critic is not None:
            with self.timer.phase("update_critic"):
                own, of_critic = self.critic.update([*scored] * self.iterations)
            metrics |= own | value_metrics(scored, groups, device)
        outcomes: list[UpdateOutcome] = []
        if not critic_alone:
            with self.timer.phase("update_actor"):
                outcomes, totals = self.scorer.update(self.optimization, [*scored] * self.iterations, self._loss())
                balance = self.scorer.balance_metrics()
            metrics |= objective_metrics(totals) | outcome_metrics(outcomes) | balance
        return TrainOutcome(metrics, scored, outcomes, of_critic)

    def _score(self, updates: Updates) -> Updates:
        """Log-probs and advantages, which stay fixed during the step's updates."""
        several = len(updates) * self.iterations > 1
        start = 0 if self.objective.reward_kl_beta or several and self.may_read_old_logprobs else 1
        if self.draws_exactly:
            drawn = _each(updates[start:], lambda batch: replace(batch, old_logprobs=batch.inference_logprobs))
            updates = [*updates[:start], *drawn]
        elif updates[start:]:
            with self.timer.phase("old_log_prob"):
                updates = [*updates[:start], *self._with_logprobs(updates[start:], "old_logprobs")]
        if self.reference is not None:
            with self.timer.phase("ref"):
                # Parameters still on their way would be kept as they were, and arrive in the reference.
                self.optimization.gather_parameters()
                with self.reference.swapped_in():
                    updates = self._with_logprobs(updates, "ref_logprobs")
        if self.teacher is not None:
            with self.timer.phase("teacher"), self.teacher.visiting():
                updates = [self.teacher.scored(part) for part in updates]
        if self.critic is not None:
            with self.timer.phase("values"):
                updates = self.critic.with_values(updates)
        updates = _each(updates, self._with_advantages)
        epsilon = getattr(self.advantage, "whitening_epsilon", None)
        if epsilon is not None:
            updates = whitened(updates, self.scorer.groups, self.scorer.device, epsilon)
        select = getattr(self.objective.loss, "select_tokens", None)
        return updates if select is None else [select(part, self._of_all_ranks) for part in updates]

    @property
    def may_read_old_logprobs(self) -> bool:
        """Return whether all updates need old log-probs before the first one, whose forward pass computes its own.

        Of what runs before it only a teacher in the advantage reads them, and perhaps an extension of the user.
        """
        loss = self.objective.loss
        early = [self.advantage, loss] if hasattr(loss, "select_tokens") else [self.advantage]
        return not all(one.__module__.startswith("megatron_rl.algorithms.") for one in early)

    def _of_all_ranks(self, own: torch.Tensor) -> torch.Tensor:
        """The vectors of all training replicas end to end; on the CPU, collective."""
        return torch.cat(gather_vectors(own, self.scorer.groups.data_group))

    def _with_logprobs(self, updates: Updates, name: str) -> Updates:
        """Of the model as it is now, under ``name``."""
        return [
            [replace(batch, **{name: own}) for batch, own in zip(part, self.scorer.logprobs(part), strict=True)]
            for part in updates
        ]

    def _with_advantages(self, batch: TokenBatch) -> TokenBatch:
        judged, penalties = by_turn(batch), {}
        if beta := self.objective.reward_kl_beta:
            judged, penalties = with_kl_in_reward(judged, beta)
        advantages, sums = self.advantage(judged)
        critic = batch.critic and replace(batch.critic, returns=self.advantage.returns(judged, advantages).detach())
        return replace(batch, advantages=advantages.detach(), advantage_sums=sums | penalties, critic=critic)

    def _loss(self) -> Loss:
        """Return the loss of a step, which keeps the log-probs of the first update for its later iterations."""
        entropy = "differentiable" if self.objective.entropy_weight else "detached"
        first: dict[int, torch.Tensor] = {}

        def loss(output: torch.Tensor, batch: TokenBatch) -> MicroLoss:
            batch = self.scorer.select(output, batch, entropy)
            if batch.old_logprobs is None and self.iterations > 1:
                old = first.setdefault(id(batch.samples), batch.current_logprobs.detach())
                batch = replace(batch, old_logprobs=old)
            return self.objective(batch)

        return loss


def _each(updates: Updates, change: Callable[[TokenBatch], TokenBatch]) -> Updates:
    return [[change(batch) for batch in part] for part in updates]


def advantage_metrics(updates: Updates, data_group: dist.ProcessGroup) -> dict[str, float]:
    """Return metrics over the step's samples of the mean advantage of each one's tokens; collective."""
    rows = []
    for batch in (batch for part in updates for batch in part):
        numbers = [batch.samples.sequence, batch.sequence_sums(batch.advantages), batch.loss_tokens()]
        rows += zip(batch.rows, *(values.tolist() for values in numbers), strict=False)
    table = torch.cat(gather_vectors(torch.tensor(rows, dtype=torch.float64).view(-1), data_group)).view(-1, 4)
    # In the order of the sequences, so that the mean is to the bit that of one rank.
    table = torch.tensor(sorted(table.tolist()), dtype=torch.float64).view(-1, 4)
    samples, index = table[:, 0].unique(return_inverse=True)
    sums = table.new_zeros(len(samples), 2).index_add(0, index, table[:, 2:])
    advantages = (sums[:, 0] / sums[:, 1].clamp_min(1)).float()
    return {
        "critic/advantages/mean": advantages.mean().item(),
        "critic/advantages/max": advantages.max().item(),
        "critic/advantages/min": advantages.min().item(),
    }
