"""Routers of experts: replay of what a rollout chose, and losses that keep experts equally busy and logits small.

Router replay (R3, arXiv 2510.11370): the trainer sends a token to the experts that the rollout sent it to. A near tie
that falls the other way in a quantised rollout is another expert, a gap far larger than rounding. Only the choice is
replayed: each expert's share is the trainer's own probability, so the router has its gradient. The ids come with the
plan of a forward pass, so a layer that is recomputed, or runs its backward pass later, has the right ones.

megatron's own balance losses are the mean over micro-batches, which differ in size here: see `BalanceLosses`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_rl.algorithms import TokenBatch
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.models import changed

TopK = Callable[..., tuple[Tensor, Tensor]]


class Routing:
    """Stands in for a router's ``router_replay``, which megatron's top-k asks."""

    def __init__(self) -> None:
        self._given: Tensor | None = None
        self.chosen: Tensor | None = None
        """[T, k] int64: the experts of the last forward pass that chose for itself, without gradients."""

    def given(self, experts: Tensor | None) -> AbstractContextManager[None]:
        """Send tokens to ``experts`` [T, k] inside the block; the largest number of their dtype: the router chooses."""
        return changed("_given", {self: experts})

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: TopK
    ) -> tuple[Tensor, Tensor]:
        """Return scores and ids of the experts to use, [T, k] each, from ``scores`` [T, experts]."""
        values, chosen = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self._given is None:
            if not torch.is_grad_enabled():
                self.chosen = chosen
            return values, chosen
        known = self._given != torch.iinfo(self._given.dtype).max
        chosen = torch.where(known, self._given.long(), chosen)
        return scores.gather(1, chosen), chosen


@dataclass(frozen=True)
class BalancePass:
    """One forward pass for the routers. Tokens are counted in G groups, over the ranks that share them."""

    members: Tensor
    """[G, tokens of this rank] fp32: 1 where the token is of the group. Those without weight are of none."""
    sizes: Tensor
    """[G] fp32: tokens of the group, of all ranks."""
    weights: Tensor
    """[G] fp32: the group's part of the denominator of the loss."""
    balance: float
    """`--moe-aux-loss-coeff`."""
    z: float
    """`--moe-z-loss-coeff`."""
    sums: Tensor
    """[layers of the model, 3 + experts] fp64, of the step's passes with gradients, this rank's part: both losses
    without coefficient, each group times its weight; weights; tokens of each expert."""

    def loss(
        self, layer: int, logits: Tensor, chosen: Tensor, group: dist.ProcessGroup, scores: str = "softmax"
    ) -> Tensor | None:
        """Return this rank's part of a layer's losses, times the group's weight; None without a coefficient.

        ``logits`` [T, experts] fp32, ``chosen`` [T, experts] bool: where the tokens are sent. ``group`` is of the
        ranks that share the tokens of a group; collective over it with a coefficient. ``scores`` is the router's
        `--moe-router-score-function`; of sigmoids each token's add up to 1 here, as megatron-core does it.
        """
        counts, each = self.members @ chosen.float(), self.weights / self.sizes.clamp_min(1)
        sums, total = self.sums[layer - 1], None
        sums[2] += (each @ self.members).sum()
        sums[3:] += counts.sum(0)
        if self.balance:
            everywhere = counts.clone()
            if group.size() > 1:
                dist.all_reduce(everywhere, group=group)
            # Switch Transformer (arXiv 2101.03961): experts x sum over them of share of tokens x mean probability. The
            # share has no gradient; a token that goes to k experts is k tokens.
            shares = everywhere / everywhere.sum(1, keepdim=True).clamp_min(1)
            each_token = logits.softmax(-1) if scores == "softmax" else functional.normalize(logits.sigmoid(), 1, -1)
            probabilities = self.members @ each_token
            value = logits.shape[1] * (each[:, None] * shares * probabilities).sum()
            sums[0] += value.detach()
            total = self.balance * value
        if self.z:
            # ST-MoE (arXiv 2202.08906): the mean of the squared log of the partition function.
            value = (each @ self.members) @ logits.logsumexp(-1).square()
            sums[1] += value.detach()
            total = self.z * value if total is None else total + self.z * value
        return total


class BalanceLosses:
    """The balance losses of a run's updates, and their metrics.

    With denominators ``D_g`` of the groups, as the loss has them before tokens without a finite log-prob leave it, the
    gradient of an update has beside the loss's own that of

        ``sum over layers of coefficient x (sum_g D_g loss_g) / (sum_g D_g)``

    over all groups of all micro-batches and replicas. A group is a sequence (``seq_aux_loss``, and the z-loss alone),
    so neither micro-batches nor layouts change it. With ``aux_loss`` it is a micro-batch. Where the loss counts samples
    a sequence counts as its share of its sample's tokens.
    """

    def __init__(self, config: RLConfig, device: torch.device, of_critic: bool = False) -> None:
        """``of_critic``: beside the value loss, whose denominator is tokens."""
        model, training = config.model, config.training
        self._by_batch = model.moe_router_load_balancing_type == "aux_loss"
        self._coefficients = model.moe_aux_loss_coeff, model.moe_z_loss_coeff or 0.0
        self._prefix = "critic" if of_critic else "actor"
        by_tokens = config.algorithm.rl_loss_aggregation == "token-mean"
        self._counts_tokens = by_tokens or of_critic or not training.perform_rl_step  # supervised training does, too
        self._sums = torch.zeros(model.num_layers, 3 + model.num_experts, dtype=torch.float64, device=device)

    @classmethod
    def of(cls, config: RLConfig, device: torch.device, of_critic: bool = False) -> BalanceLosses | None:
        """Return the losses; None without experts."""
        return None if config.model.num_experts is None else cls(config, device, of_critic)

    def during(self, batch: TokenBatch, tensor_group: dist.ProcessGroup | None) -> BalancePass:
        """Make a pass over ``batch``; ``tensor_group`` of the ranks that cut its tokens once more, or None."""
        counts = batch.loss_tokens().float()
        # Of a sample's weight in the policy loss, 1, a sequence has the share of its tokens.
        weights = counts if self._counts_tokens else counts / batch.sample_tokens().clamp_min(1)
        index = torch.arange(weights.numel(), device=weights.device)[:, None]
        sizes = batch.packing.cu_seqlens.diff().float() * (weights > 0)
        own = batch.sequence_index if batch.packing.share is None else batch.sequence_index[batch.packing.share.local]
        if tensor_group is not None:
            own = own.chunk(tensor_group.size())[tensor_group.rank()]
        members = ((index == own) & (weights > 0)[:, None]).float()
        if self._by_batch:
            members, sizes, weights = (values.sum(0, keepdim=True) for values in (members, sizes, weights))
        return BalancePass(members, sizes, weights, *self._coefficients, self._sums)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the passes since the last call; the same on all ranks, collective over the job."""
        dist.all_reduce(self._sums)
        table = self._sums.to("cpu", copy=True)
        self._sums.zero_()
        weight, loads = table[:, 2].sum().clamp_min(1e-30), table[:, 3:]
        busiest = loads.amax(1) / loads.mean(1).clamp_min(1e-30)
        layers = (loads.sum(1) > 0).sum().clamp_min(1)  # those that have experts
        metrics = {"expert_load_max": (busiest.sum() / layers).item()}
        for column, name in enumerate(("load_balancing_loss", "router_z_loss")):
            if self._coefficients[column]:
                metrics[name] = (table[:, column].sum() / weight).item()
        return {f"{self._prefix}/{name}": value for name, value in metrics.items()}


class BalancedRouter(TopKRouter):
    """megatron's router; in passes that are told of balance their gradient comes with the probabilities."""

    _pass: BalancePass | None = None

    def told(self, balance: BalancePass | None) -> AbstractContextManager[None]:
        """Enter a block in which forward passes with gradients are of ``balance``."""
        return changed("_pass", {self: balance})

    def freeze_bias(self) -> None:
        """Make a parameter without gradient of the router's bias, if it has one.

        As megatron's buffer it is not among what is loaded, saved and compared. It stays fp32.
        """
        bias = self.expert_bias
        if bias is not None:
            del self.expert_bias
            self.expert_bias = torch.nn.Parameter(bias.float(), requires_grad=False)

    def _apply_expert_bias(self, *_: Any, **__: Any) -> None:
        """Do nothing: the bias is frozen, so no tokens are counted. megatron compiles its own at its first call."""

    def routing(self, logits: Tensor, *given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Route as megatron does."""
        probabilities, chosen = super().routing(logits, *given, **named)
        if self._pass is None or not torch.is_grad_enabled():  # a layer that is recomputed comes twice, once without
            return probabilities, chosen
        flat = logits.view(-1, logits.shape[-1])
        loss = self._pass.loss(self.layer_number, flat, chosen, self.tp_cp_group, self.score_function)
        return (probabilities if loss is None else MoEAuxLossAutoScaler.apply(probabilities, loss)), chosen
