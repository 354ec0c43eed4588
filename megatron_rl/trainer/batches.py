"""Pack samples into micro-batches, balanced over the data-parallel ranks."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algorithms.batch import SAMPLE_FIELDS, Sample, TokenBatch
from megatron_rl.algorithms.context import ContextShare, SharedPrompts
from megatron_rl.families.architecture import ONE_STAGE, Stages
from megatron_rl.platform.collectives import gather_vectors, max_over
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.packing import balance, collate, pack, prompt_of, prompt_pieces, skipped_tokens, without_loss

logger = logging.getLogger(__name__)

_NOTHING = torch.zeros(2, dtype=torch.int64)
_DUMMY_SAMPLE = Sample(
    token_ids=_NOTHING, loss_mask=_NOTHING > 0, inference_logprobs=_NOTHING.float(), versions=_NOTHING, sample_id=-1
)
"""Run by an expert-parallel rank without samples, so that its collectives match."""
_DTYPES = (torch.int64, torch.float32, torch.bool, torch.uint8, torch.int16)
"""Dtypes of sample fields, for their exchange."""


@dataclass
class BatchBuilder:
    """Splits a step's samples into updates, balances tokens over ranks, and packs micro-batches."""

    bin_tokens: int
    round_to: int
    """A micro-batch's tokens are padded to a multiple of it."""
    device: torch.device
    groups: ParallelGroups
    stages: Stages = ONE_STAGE
    shares_prompts: bool = False
    """Compute the common prefix of samples once per micro-batch."""
    warned: bool = False
    """Whether it has warned of small updates, once per launch."""

    def updates(self, samples: Sequence[Sample], batch_size: int, seed: int) -> list[list[TokenBatch]]:
        """Return the micro-batches of each optimizer update of one pass over a step's samples; collective.

        Uses the fewest updates of at most ``batch_size`` samples, equal in size to one sample: 100 samples with a
        ``batch_size`` of 64 are two updates of 50, because 64 and 36 would include a noisier step of the same size.
        Without samples there is no update: an empty one would still move the weights by momentum and weight decay.

        A sample counts once, and all its sequences are in one update, possibly in several micro-batches and ranks.
        Samples are shuffled by ``seed``; their sequences are balanced by tokens over the training replicas and
        exchanged, so a rank trains on samples that others generated.
        """
        local = torch.tensor([(*_key(s), s.length, *self._prompt(s)) for s in samples], dtype=torch.int64).view(-1)
        table = sorted(torch.cat(gather_vectors(local, self.groups.rollout_group)).view(-1, 5).tolist())
        if not table:
            return []
        order = sorted({sample_id for sample_id, *_ in table})
        random.Random(seed).shuffle(order)
        num_updates = -(-len(order) // batch_size)
        self._warn_of_small_updates(len(order), batch_size)
        update_of = {sample_id: place % num_updates for place, sample_id in enumerate(order)}
        rank_of: dict[tuple[int, int], int] = {}
        for update in range(num_updates):
            members = [row for row in table if update_of[row[0]] == update]
            pieces, costs = self._pieces([(row[2], tuple(row[3:])) for row in members], self.groups.data_group.size())
            ranks = balance(costs, self.groups.data_group.size())
            rank_of |= {tuple(members[i][:2]): rank for piece, rank in zip(pieces, ranks, strict=True) for i in piece}
        destination = [rank_of[_key(sample)] for sample in samples]
        group, copies = self.groups.rollout_group, self.groups.context_group.size()
        mine = exchange_samples(samples, destination, group, self.device, copies)
        parts: list[list[Sample]] = [[] for _ in range(num_updates)]
        for sample in mine:
            parts[update_of[sample.sample_id]].append(sample)
        return [self.pack(part, seed + update) for update, part in enumerate(parts)]

    def pack(self, samples: Sequence[Sample], seed: int) -> list[TokenBatch]:
        """Pack into best-fit bins of at most ``bin_tokens`` tokens, in shuffled order; collective with expert
        parallelism.

        Pipeline stages need one size, so bins are padded to the fullest, which is little. Bins without loss are added
        for interleaved stages, which need a multiple of their number, and for expert-parallel ranks, which need equal
        numbers.
        """
        pieces, costs = self._pieces([(sample.length, self._prompt(sample)) for sample in samples])
        bins = pack(costs, self.bin_tokens, seed)
        size = self.round_to
        if self.stages.count > 1 and bins:
            fullest = max(sum(costs[piece] for piece in members) for members in bins)
            size = -(-fullest // size) * size
        batches = [self._collated([samples[i] for piece in own for i in pieces[piece]], size) for own in bins]
        count = len(batches)
        if self.stages.chunks > 1:
            count = -(-count // self.stages.count) * self.stages.count
        if self.groups.shares_experts:
            count = int(max_over({"batches": count}, self.groups.lockstep_group)["batches"])
        if count > len(batches):
            idle = batches[0] if batches else self._collated([_DUMMY_SAMPLE], size)
            batches += [without_loss(idle)] * (count - len(batches))
        return batches

    def _collated(self, samples: Sequence[Sample], round_to: int) -> TokenBatch:
        """Collate samples; with context parallelism or shared prompts including this rank's share."""
        group = self.groups.context_group
        if self.shares_prompts:  # in the order of their tokens, where most have much in common with the one before
            samples = sorted(samples, key=lambda sample: sample.token_ids.tolist())
            skipped = skipped_tokens(samples)
            batch = collate(samples, self.device, round_to, skipped)
            dummies = [0] * (len(batch.packing.lengths) - len(skipped))
            share = SharedPrompts.of(batch.packing.lengths, skipped + dummies, self.device)
        else:
            batch, size = collate(samples, self.device, round_to), group.size()
            if size == 1:
                return batch
            share = ContextShare.of(batch.packing.lengths, group.rank(), size, self.device)
        return replace(batch, packing=replace(batch.packing, share=share))

    def _prompt(self, sample: Sample) -> tuple[int, int]:
        return prompt_of(sample) if self.shares_prompts else (0, 0)

    def _pieces(
        self, samples: Sequence[tuple[int, tuple[int, int]]], ranks: int = 1
    ) -> tuple[list[list[int]], list[int]]:
        """Return sets of samples, given as (length, prompt), to keep on one rank, and the tokens of each set."""
        lengths = [length for length, _ in samples]
        if not self.shares_prompts:
            return [[index] for index in range(len(samples))], lengths
        fair = -(-sum(length - shared for length, (_, shared) in samples) // ranks)
        return prompt_pieces(lengths, [prompt for _, prompt in samples], min(self.bin_tokens, fair))

    def _warn_of_small_updates(self, count: int, batch_size: int) -> None:
        if 2 * count >= batch_size or self.warned or not self.groups.is_main:
            return
        self.warned = True
        logger.warning(
            "an update has %d samples instead of --global-batch-size %d: others have no reward variance or no grade "
            "(training/signal_share); use tasks that are neither too easy nor too hard, or more of them a step",
            count, batch_size,
        )  # fmt: skip


def exchange_samples(
    local: Sequence[Sample], destination: Sequence[int], rollout_group: dist.ProcessGroup | None,
    device: torch.device | str = "cpu", copies: int = 1,
) -> list[Sample]:  # fmt: skip
    """Send each sample to a training replica and return those received; collective over the group.

    Flat tensors travel directly between ranks in two all-to-alls, sizes and fields. Nothing is pickled.

    Args:
        local: this rank's samples, on the CPU; may be empty.
        destination: the replica of each sample.
        rollout_group: ranks that have samples and train on them; None is all ranks.
        device: device of the exchange: the CPU for gloo, this rank's GPU for nccl.
        copies: ranks per replica, consecutive in the group; each receives all samples of its replica.

    Returns:
        This rank's samples, on the CPU, ordered by ``sample_id`` and ``sequence``.
    """
    num_ranks = dist.get_world_size(rollout_group)
    if num_ranks == 1:  # nothing travels
        return sorted(local, key=_key)
    outgoing = [[torch.zeros(0, dtype=torch.int64)] for _ in range(num_ranks)]
    for sample, replica in zip(local, destination, strict=True):
        flat = _flat(sample)
        for rank in range(replica * copies, (replica + 1) * copies):
            outgoing[rank].append(flat)
    parts = [torch.cat(part) for part in outgoing]
    sizes = [part.numel() for part in parts]
    sizes_here = torch.empty(num_ranks, dtype=torch.int64, device=device)
    dist.all_to_all_single(sizes_here, torch.tensor(sizes, device=device), group=rollout_group)
    incoming = torch.empty(int(sizes_here.sum()), dtype=torch.int64, device=device)
    dist.all_to_all_single(incoming, torch.cat(parts).to(device), sizes_here.tolist(), sizes, group=rollout_group)
    return sorted(_samples(incoming.cpu()), key=_key)


def _key(sample: Sample) -> tuple[int, int]:
    """Return a key that is unique in the step."""
    return sample.sample_id, sample.sequence


def _flat(sample: Sample) -> Tensor:
    """Serialise to int64: rows, two dimensions and dtype of each field, then all fields as bytes, padded to 8."""
    header, parts = [], []
    for name, kind in SAMPLE_FIELDS.items():
        value = getattr(sample, name)
        field = torch.empty(0, dtype=torch.bool) if value is None else torch.as_tensor(value, dtype=kind.dtype)
        header += [*field.shape, 1, 1, 1][:3] + [_DTYPES.index(field.dtype)]
        parts.append(field.contiguous().view(-1).view(torch.uint8))
    parts.append(torch.zeros(-sum(map(len, parts)) % 8, dtype=torch.uint8))
    return torch.cat([torch.tensor(header), torch.cat(parts).view(torch.int64)])


def _samples(flat: Tensor) -> Iterator[Sample]:
    """Invert ``_flat``, for any number of samples."""
    while flat.numel():
        header = flat[: 4 * len(SAMPLE_FIELDS)].view(-1, 4).tolist()
        sizes = [math.prod(shape) * _DTYPES[number].itemsize for *shape, number in header]
        words = 4 * len(SAMPLE_FIELDS) - sum(sizes) // -8
        parts = flat[4 * len(SAMPLE_FIELDS) : words].view(torch.uint8).split([*sizes, -sum(sizes) % 8])
        fields: dict[str, Any] = {}
        for (name, kind), (*shape, number), part in zip(SAMPLE_FIELDS.items(), header, parts[:-1], strict=True):
            value = part.clone().view(_DTYPES[number])  # a view would keep the whole exchange in memory
            if not kind.per_token:
                fields[name] = value.item()
            elif shape[0]:
                fields[name] = value.view(shape) if kind.dtype is None else value
        yield Sample(**fields)
        flat = flat[words:]
