"""All optimizer updates of one rollout."""

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
from megatron_rl.trainer.critic import Critic, value_metrics, whiten
from megatron_rl.trainer.optimizer import Optimization, UpdateOutcome
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.trainer.teacher import Teacher
from megatron_rl.trainer.update import Loss, TrainOutcome, Updates, outcome_metrics


class ReferencePolicy:
    """The reference model of the KL penalty: a host copy of the first weights, swapped in when needed.

    Values move, storage does not: optimizer buffers and captured graphs still point at the parameters. Meanwhile the
    policy's own values are kept on the host, and restored bit for bit.
    """

    def __init__(self, policy: PolicyModel, copies: RolloutQuantization | None = None) -> None:
        """``copies``: quantised copies, notified of every swap: aligned training runs on them."""
        self._copies = copies
        self._parameters = list(policy.parameters())
        self._frozen = self._on_host()

    @contextlib.contextmanager
    @torch.no_grad()
    def swapped_in(self) -> Iterator[None]:
        """Swap the reference weights into the model, inside the context."""
        own = self._on_host()
        self._write(self._frozen)
        try:
            yield
        finally:
            self._write(own)

    def _on_host(self) -> list[torch.Tensor]:
        """Copy the values to the host, from a GPU to pinned memory, which is several times faster."""
        copies = []
        for parameter in self._parameters:
            copy = torch.empty_like(parameter, device="cpu", pin_memory=parameter.is_cuda)
            copies.append(copy.copy_(parameter.detach(), non_blocking=True))
        return copies

    def _write(self, values: list[torch.Tensor]) -> None:
        # The stream orders both copies, and torch keeps pinned memory until then.
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.data.copy_(value, non_blocking=True)
        if self._copies is not None:
            self._copies.weights_changed()


class BasePolicy:
    """The reference of a LoRA policy: the frozen base model, without a copy of its weights."""

    def __init__(self, policy: PolicyModel, copies: RolloutQuantization | None = None) -> None:
        """``copies``: see `ReferencePolicy`."""
        self._policy, self._copies = policy, copies

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Switch the adapters off, inside the context."""
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
    """Computes log-probs, values and advantages as needed, then runs the updates."""

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
    """None if the advantage needs none."""
    rollout_is_exact: bool = False
    """The rollout's log-probs are bit-identical to the trainer's at the beginning of the step."""

    def step(self, updates: Updates, rewards: StepRewards, critic_alone: bool = False) -> TrainOutcome:
        """Run the rollout's updates ``grpo_iterations`` times, the critic's first, or ``critic_alone``; collective."""
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
        """Compute the log-probs and advantages that stay fixed during the step's updates."""
        several = len(updates) * self.iterations > 1
        start = 0 if self.objective.reward_kl_beta or several and self.needs_old_logprobs else 1
        if self.rollout_is_exact:
            drawn = _each(updates[start:], lambda batch: replace(batch, old_logprobs=batch.inference_logprobs))
            updates = [*updates[:start], *drawn]
        elif updates[start:]:
            with self.timer.phase("old_log_prob"):
                updates = [*updates[:start], *self._with_logprobs(updates[start:], "old_logprobs")]
        if self.reference is not None:
            with self.timer.phase("ref"):
                # With overlapped gathering, old parameters would be saved, and the new ones arrive in the reference.
                self.optimization.gather_parameters()
                with self.reference.swapped_in():
                    updates = self._with_logprobs(updates, "ref_logprobs")
        if self.teacher is not None:
            with self.timer.phase("teacher"), self.teacher.on_device():
                updates = [self.teacher.scored(part) for part in updates]
        if self.critic is not None:
            with self.timer.phase("values"):
                updates = self.critic.with_values(updates)
        updates = _each(updates, self._with_advantages)
        epsilon = getattr(self.advantage, "whitening_epsilon", None)
        if epsilon is not None:
            updates = whiten(updates, self.scorer.groups, self.scorer.device, epsilon)
        select = getattr(self.objective.loss, "select_tokens", None)
        return updates if select is None else [select(part, self._of_all_ranks) for part in updates]

    @property
    def needs_old_logprobs(self) -> bool:
        """Return whether all updates need old log-probs in advance; otherwise a forward pass computes its own.

        Only a teacher in the advantage reads them earlier, and possibly a user's extension.
        """
        loss = self.objective.loss
        early = [self.advantage, loss] if hasattr(loss, "select_tokens") else [self.advantage]
        return not all(one.__module__.startswith("megatron_rl.algorithms.") for one in early)

    def _of_all_ranks(self, own: torch.Tensor) -> torch.Tensor:
        """Concatenate the vectors of all training replicas on the CPU; collective."""
        return torch.cat(gather_vectors(own, self.scorer.groups.data_group))

    def _with_logprobs(self, updates: Updates, name: str) -> Updates:
        """Add the model's current log-probs as ``name``."""
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
        """Return the loss of a step, which keeps the first update's log-probs for later iterations."""
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
    """Return metrics of the mean advantage per sample, over the step; collective."""
    rows = []
    for batch in (batch for part in updates for batch in part):
        numbers = [batch.samples.sequence, batch.sequence_sums(batch.advantages), batch.loss_tokens()]
        rows += zip(batch.rows, *(values.tolist() for values in numbers), strict=False)
    table = torch.cat(gather_vectors(torch.tensor(rows, dtype=torch.float64).view(-1), data_group)).view(-1, 4)
    # In the order of the sequences, so that the mean is bit-identical to that of one rank.
    table = torch.tensor(sorted(table.tolist()), dtype=torch.float64).view(-1, 4)
    samples, index = table[:, 0].unique(return_inverse=True)
    sums = table.new_zeros(len(samples), 2).index_add(0, index, table[:, 2:])
    advantages = (sums[:, 0] / sums[:, 1].clamp_min(1)).float()
    return {
        "critic/advantages/mean": advantages.mean().item(),
        "critic/advantages/max": advantages.max().item(),
        "critic/advantages/min": advantages.min().item(),
    }
