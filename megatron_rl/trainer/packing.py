"""Which samples share a micro-batch, which data-parallel rank trains on which, and how they are laid end to end."""

from __future__ import annotations

import bisect
import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron_rl.algorithms import TokenBatch
from megatron_rl.errors import ConfigError, TrainingError
from megatron_rl.types import Sample

PADDING_TOKEN = 0
"""Any id of the vocabulary does: padding is a sequence of its own without loss, seen by no other token."""


def balance(lengths: Sequence[int], num_ranks: int) -> list[int]:
    """The data-parallel rank of each sample, with about the same number of tokens on all ranks.

    Longest first, each sample goes to the rank with the fewest tokens so far (LPT: Graham, 1969). Ranks
    within one per cent of a rank's share count as equal, and of those the one with the fewest samples takes
    it: token counts come first, sample counts second. Of 4,096 log-normal lengths on 64 ranks the fullest
    has 0.4 % above its share, and all have 63 to 65 samples. Nothing is random: all ranks agree.

    Returns:
        One rank per sample, in the order of ``lengths``; every rank occurs if there are enough samples.
    """
    tokens, samples = [0] * num_ranks, [0] * num_ranks
    tolerance = sum(lengths) / num_ranks / 100
    destination = [0] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        near = min(tokens) + tolerance
        rank = min((rank for rank in range(num_ranks) if tokens[rank] <= near), key=samples.__getitem__)
        destination[index] = rank
        tokens[rank] += lengths[index]
        samples[rank] += 1
    return destination


def pack(lengths: Sequence[int], capacity: int, seed: int = 0) -> list[list[int]]:
    """Best-fit decreasing: each sample, longest first, goes into the fullest bin that still has room for it.

    Guarantees at most 11/9 of the optimal number of bins plus 4 (Johnson, 1974); with hundreds of log-normal
    lengths bins are 98 to 99.9 % full. The order of the bins is shuffled: left as it is, all long samples
    would come first in every step.

    Args:
        lengths: tokens of each sample, 1 or more.
        capacity: tokens of a bin.
        seed: of the shuffle; the same seed gives the same order.

    Returns:
        Bins of indices into ``lengths``; every index once, none empty.

    Raises:
        ConfigError: a sample is longer than a bin (names the first one).
    """
    for index, length in enumerate(lengths):
        if length > capacity:
            raise ConfigError([
                f"sample {index} has {length} tokens and a micro-batch holds {capacity}: sequences are never split; "
                f"raise the micro-batch's token limit to {length} or limit the length of completions"
            ])
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, bin), sorted
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect.bisect_left(room, (lengths[index], 0))
        if place == len(room):
            free, chosen = capacity, len(bins)
            bins.append([])
        else:
            free, chosen = room.pop(place)
        bins[chosen].append(index)
        bisect.insort(room, (free - lengths[index], chosen))
    random.Random(seed).shuffle(bins)
    return bins


def collate(samples: Sequence[Sample], device: torch.device | str, round_to: int = 1) -> TokenBatch:
    """Lays the samples end to end, in their order, and moves them to the device once.

    With ``round_to=4``, two samples ``P0 A0 E`` and ``Q0 B0`` (``-`` is padding)::

        token_ids    P0 A0  E  Q0 B0  -  -  -
        position_ids  0  1  2   0  1  0  1  2
        cu_seqlens    0        3     5        8
        loss_mask     0  1  1   0  1  0  0  0

    Args:
        samples: at least one, on the CPU.
        device: where the tensors of the batch go.
        round_to: T becomes a multiple of this (tensor-parallel size, the longest micro-batch of a pipeline) by dummy
            sequences, none of them longer than the samples; they are the last of ``lengths`` and ``cu_seqlens`` and
            have no entry in ``sample_ids``.

    Raises:
        TrainingError: a sample without a prompt: its first token has no log-prob, nothing precedes it.
    """
    for sample in samples:
        if sample.prompt_length < 1:
            raise TrainingError(
                f"sample {sample.sample_id} has no prompt: nothing precedes its first token; give it 1 token or more"
            )
    padding = -sum(sample.length for sample in samples) % round_to
    own = tuple(sample.length for sample in samples)
    dummies = _dummies(padding, max(own))
    lengths = own + dummies
    prompt_lengths = [*(sample.prompt_length for sample in samples), *dummies]

    per_sequence = torch.tensor(lengths)
    cu_seqlens = torch.nn.functional.pad(per_sequence.cumsum(0), (1, 0))
    sequence = torch.arange(len(lengths)).repeat_interleave(per_sequence)
    places = torch.arange(sum(lengths))
    position_ids = places - cu_seqlens[sequence]
    in_loss = position_ids >= torch.tensor(prompt_lengths)[sequence]
    for sample, first in zip(samples, cu_seqlens.tolist(), strict=False):  # the last border begins nothing
        for start, end in sample.environment_spans:
            in_loss[first + start : first + end] = False
    rewards = torch.zeros(sum(lengths))
    ends = torch.zeros_like(per_sequence).scatter_reduce(0, sequence, places * in_loss, "amax")
    rewards[ends[: len(samples)]] = torch.tensor([sample.reward for sample in samples])
    filler = torch.zeros(padding)
    inference_logprobs = torch.cat([*(sample.inference_logprobs for sample in samples), filler])
    token_ids = torch.cat([*(sample.token_ids for sample in samples), filler.long() + PADDING_TOKEN])
    routing = None
    if samples[0].routing is not None:
        ids = torch.cat([sample.routing for sample in samples])
        unknown = ids.new_full((padding, *ids.shape[1:]), torch.iinfo(ids.dtype).max)
        routing = torch.cat([ids, unknown]).transpose(0, 1).contiguous().to(device)
    versions = torch.tensor([sample.policy_version for sample in samples] + [0] * len(dummies))[sequence]
    for sample, first in zip(samples, cu_seqlens.tolist(), strict=False):
        for version, end in reversed(sample.older):  # each stretch from the sample's beginning, the shortest last
            versions[first : first + end] = version
    of_sequences = torch.tensor(
        [(s.sequence, s.tokens_elsewhere, s.truncated) for s in samples] + [(0, 0, False)] * len(dummies)
    ).to(device)
    return TokenBatch(
        token_ids=token_ids.to(device),
        position_ids=position_ids.to(device),
        cu_seqlens=cu_seqlens.int().to(device),
        sequence_index=sequence.to(device),
        lengths=lengths,
        sample_ids=tuple(sample.sample_id for sample in samples),
        loss_mask=in_loss.float().to(device),
        rewards=torch.where(in_loss, rewards, 0.0).to(device),
        inference_logprobs=torch.where(in_loss, inference_logprobs, 0.0).to(device),
        versions=versions.to(device),
        sequence_numbers=of_sequences[:, 0],
        tokens_elsewhere=of_sequences[:, 1],
        truncated=of_sequences[:, 2] > 0,
        padding=padding,
        routing=routing,
    )


def _dummies(padding: int, longest: int) -> tuple[int, ...]:
    whole, rest = divmod(padding, longest)
    return (longest,) * whole + ((rest,) if rest else ())


def without_loss(batch: TokenBatch) -> TokenBatch:
    """One of its size that changes nothing."""
    nothing = torch.zeros_like(batch.loss_mask)
    return replace(
        batch, loss_mask=nothing, rewards=nothing, inference_logprobs=nothing, sample_ids=(),
        tokens_elsewhere=torch.zeros_like(batch.tokens_elsewhere),
    )  # fmt: skip
