"""Expert routers: replay of rollout choices, and losses that balance experts and keep logits small.

Router replay (R3, arXiv 2510.11370): training uses the experts chosen in the rollout. A near tie decided differently in
a quantised rollout means another expert, a mismatch far larger than rounding. Only the choice is replayed: each
expert's share is the trainer's own probability, so the router has its gradient. The ids are part of the forward pass's
plan, so recomputed layers and delayed backward passes use the right ones.

megatron's balance losses are means over micro-batches, which differ in size here: see `BalanceLosses`.
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
from megatron_rl.models import override

TopK = Callable[..., tuple[Tensor, Tensor]]


class Routing:
    """Replaces a router's ``router_replay``, which megatron's top-k calls."""

    def __init__(self) -> None:
        self._replayed: Tensor | None = None
        self.chosen: Tensor | None = None
        """[T, k] int64: experts of the last pass without gradients and without replay."""

    def replaying(self, experts: Tensor | None) -> AbstractContextManager[None]:
        """Use ``experts`` [T, k] inside the context; entries with the dtype's maximum are chosen by the router."""
        return override("_replayed", {self: experts})

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: TopK
    ) -> tuple[Tensor, Tensor]:
        """Return scores and ids of the experts to use, [T, k] each, from ``scores`` [T, experts]."""
        values, chosen = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self._replayed is None:
            if not torch.is_grad_enabled():
                self.chosen = chosen
            return values, chosen
        known = self._replayed != torch.iinfo(self._replayed.dtype).max
        chosen = torch.where(known, self._replayed.long(), chosen)
        return scores.gather(1, chosen), chosen


@dataclass(frozen=True)
class BalancePass:
    """Inputs of the balance losses for one forward pass. Tokens form G groups over the ranks that share them."""

    members: Tensor
    """[G, tokens of this rank] fp32: 1 if the token is in the group. Tokens without weight are in none."""
    sizes: Tensor
    """[G] fp32: tokens of the group on all ranks."""
    weights: Tensor
    """[G] fp32: the group's part of the loss denominator."""
    balance: float
    """`--moe-aux-loss-coeff`."""
    z: float
    """`--moe-z-loss-coeff`."""
    sums: Tensor
    """[layers of the model, 3 + experts] fp64, this rank's sums over the step's passes with gradients: the two weighted
    losses without coefficients, weights, tokens per expert.
    """

    def loss(
        self, layer: int, logits: Tensor, chosen: Tensor, group: dist.ProcessGroup, scores: str = "softmax"
    ) -> Tensor | None:
        """Return this rank's part of a layer's losses, weighted by group; None without coefficients.

        ``logits`` [T, experts] fp32, ``chosen`` [T, experts] bool. ``group``: the ranks that share a group's tokens;
        collective over it. ``scores``: `--moe-router-score-function`; sigmoids are normalised to sum 1 per token, as in
        megatron-core.
        """
        counts, each = self.members @ chosen.float(), self.weights / self.sizes.clamp_min(1)
        sums, total = self.sums[layer - 1], None
        sums[2] += (each @ self.members).sum()
        sums[3:] += counts.sum(0)
        if self.balance:
            everywhere = counts.clone()
            if group.size() > 1:
                dist.all_reduce(everywhere, group=group)
            # Switch Transformer (arXiv 2101.03961): experts x sum over experts of token share x mean probability. The
            # share has no gradient; a token with k experts counts k times.
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

    With denominators ``D_g`` of the groups, as in the loss before tokens with a non-finite log-prob are dropped, an
    update has in addition the gradient of

        ``sum over layers of coefficient x (sum_g D_g loss_g) / (sum_g D_g)``

    over all groups of all micro-batches and replicas. A group is a sequence (``seq_aux_loss``, or only a z-loss), so
    the result does not depend on micro-batches and layouts; with ``aux_loss`` it is a micro-batch. If the loss averages
    over samples, a sequence counts as its share of its sample's tokens.
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

    def new_pass(self, batch: TokenBatch, tensor_group: dist.ProcessGroup | None) -> BalancePass:
        """Return the inputs for a pass over ``batch``; ``tensor_group``: ranks that split its tokens, or None."""
        counts = batch.loss_tokens().float()
        # The policy loss weighs a sample 1, of which a sequence has the share of its tokens.
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
        """Return the metrics since the last call; the same on all ranks, collective over the job."""
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
    """megatron's router, which adds the gradient of balance losses to its probabilities."""

    _pass: BalancePass | None = None

    def using_balance(self, balance: BalancePass | None) -> AbstractContextManager[None]:
        """Use ``balance`` in forward passes with gradients, inside the context."""
        return override("_pass", {self: balance})

    def freeze_bias(self) -> None:
        """Turn the router's bias, if any, from a buffer into a frozen fp32 parameter, which checkpoints include."""
        bias = self.expert_bias
        if bias is not None:
            del self.expert_bias
            self.expert_bias = torch.nn.Parameter(bias.float(), requires_grad=False)

    def _apply_expert_bias(self, *_: Any, **__: Any) -> None:
        """Do nothing: the bias is frozen, so tokens need not be counted; megatron would compile a function."""

    def routing(self, logits: Tensor, *args: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Route like megatron."""
        probabilities, chosen = super().routing(logits, *args, **named)
        if self._pass is None or not torch.is_grad_enabled():  # a layer that is recomputed comes twice, once without
            return probabilities, chosen
        flat = logits.view(-1, logits.shape[-1])
        loss = self._pass.loss(self.layer_number, flat, chosen, self.tp_cp_group, self.score_function)
        return (probabilities if loss is None else MoEAuxLossAutoScaler.apply(probabilities, loss)), chosen
