"""What the trainer says about an engine's completions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl.algorithms import TokenBatch
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.packing import collate
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.types import Completion, Request
from tests.support.samples import make_sample
from tests.support.tokens import changed


def packed(
    requests: Sequence[Request], groups: Sequence[Sequence[Completion]], device: str = "cpu"
) -> TokenBatch:
    """All completions in one batch, with a padding sequence at the end."""
    samples = [
        make_sample(
            wanted.prompt_ids + completion.token_ids,
            len(wanted.prompt_ids),
            inference_logprobs=torch.tensor((0.0,) * len(wanted.prompt_ids) + completion.inference_logprobs),
            routing=completion.routing,
        )
        for wanted, group in zip(requests, groups, strict=True)
        for completion in group
    ]
    return collate(samples, device, round_to=8)


def gaps(policy: PolicyModel, groups: ParallelGroups, batch: TokenBatch, temperature: float) -> torch.Tensor:
    """|trainer - engine| at every sampled token."""
    trained = Scorer(policy, groups, temperature).logprobs([batch])[0]
    return (trained - batch.inference_logprobs).abs()[batch.loss_mask.bool()]


def routing_of(batch: TokenBatch) -> torch.Tensor:
    """[layers, T, k]."""
    return batch.samples.routing.transpose(0, 1)


def rerouted(batch: TokenBatch, routing: torch.Tensor | None) -> TokenBatch:
    """The batch with other experts, [layers, T, k]."""
    return changed(batch, routing=None if routing is None else routing.transpose(0, 1))


def own_experts(policy: PolicyModel, groups: ParallelGroups, batch: TokenBatch) -> torch.Tensor:
    """[layers, T, k]: those that the trainer's routers choose, the likeliest first."""
    Scorer(policy, groups, 1.0).logprobs([rerouted(batch, None)])
    return torch.stack([layer.mlp.router.router_replay.chosen for layer in policy.gpt.decoder.layers])
