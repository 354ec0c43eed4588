"""One update of 600 loss tokens, in one micro-batch or in several; picked on one rank or on two."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl.algorithms import TokenBatch
from megatron_rl.algorithms.covariance import TokenSelection, places
from megatron_rl.algorithms.losses import clip_cov, kl_cov
from megatron_rl.platform.collectives import gather_vectors
from megatron_rl.platform.groups import ParallelGroups, shut_down
from tests.distributed.programs import join
from tests.support.tokens import step_rewards, token_batch

SAMPLES, LENGTH = 12, 60
"""The first ten tokens of each are the prompt."""


def parts_of(packs: int) -> list[list[TokenBatch]]:
    """One update of ``packs`` micro-batches, the samples dealt in turn."""
    draw = torch.Generator().manual_seed(7)
    advantages = torch.randn(SAMPLES, LENGTH, generator=draw)
    logprobs = -2 * torch.rand(SAMPLES, LENGTH, generator=draw)
    everything = torch.ones(SAMPLES, dtype=torch.bool)
    step = step_rewards(torch.arange(float(SAMPLES)), everything, torch.zeros(SAMPLES, dtype=torch.int64))
    part = []
    for pack in range(packs):
        own = list(range(pack, SAMPLES, packs))
        part.append(token_batch(
            torch.arange(len(own)).repeat_interleave(LENGTH),
            torch.tensor([0.0] * 10 + [1.0] * (LENGTH - 10)).repeat(len(own)),
            position_ids=torch.arange(LENGTH).repeat(len(own)),
            sample_id=tuple(own),
            advantages=advantages[own].flatten(),
            inference_logprobs=logprobs[own].flatten(),
            step=step,
        ))  # fmt: skip
    return [part]


def selected(loss: TokenSelection, part: Sequence[TokenBatch], groups: ParallelGroups) -> list[TokenBatch]:
    """As the trainer asks for it."""
    return loss.select_tokens(part, lambda own: torch.cat(gather_vectors(own, groups.data_group)))


def picked_on_each_rank(name: str) -> list[int]:
    """The numbers of the tokens that this rank has picked; rank 0 has two of three micro-batches."""
    groups = join(tensor_size=1)
    loss = {"clip_cov": clip_cov.Loss(share=0.05, lower=0.1), "kl_cov": kl_cov.Loss(share=0.05)}[name]
    (part,) = parts_of(packs=3)
    own = selected(loss, part[:2] if groups.rank == 0 else part[2:], groups)
    shut_down()
    return [number for batch in own for number in places(batch)[batch.selected].tolist()]
