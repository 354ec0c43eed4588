"""Samples to packed micro-batches, balanced over the data-parallel ranks."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

import torch

from megatron_rl.packing.bins import balance, pack
from megatron_rl.packing.collate import collate
from megatron_rl.packing.exchange import exchange_samples
from megatron_rl.parallel import ParallelGroups
from megatron_rl.parallel.collectives import gather_vectors
from megatron_rl.types import PackedBatch, Sample

logger = logging.getLogger(__name__)


class BatchBuilder:
    """Splits a step's samples into updates, gives every rank about the same tokens, and packs."""

    def __init__(
        self, bin_tokens: int, round_to: int, device: torch.device, groups: ParallelGroups
    ) -> None:
        self._bin_tokens = bin_tokens
        self._round_to = round_to
        self._device = device
        self._groups = groups
        self._told = not groups.is_main

    def updates(
        self, samples: Sequence[Sample], batch_size: int, seed: int
    ) -> list[list[PackedBatch]]:
        """Micro-batches of each optimizer update of one pass over a step's samples; collective.

        As few updates as hold all samples of the job with at most ``batch_size`` each, and equal to one sample: where
        groups were dropped there are fewer updates, not smaller ones. 100 samples and a ``batch_size`` of 64 are two
        updates of 50: 64 and 36 would be two of the same step size, one of them noisier. Fewer samples than
        ``batch_size`` are one update, no samples none: an empty one would still move the weights by momentum and
        weight decay.

        Samples are shuffled by ``seed``, then balanced by tokens over the ranks and exchanged, so a rank trains on
        samples it did not generate.
        """
        ids, lengths = self._global_lengths(samples)
        if not ids:
            return []
        order = list(range(len(ids)))
        random.Random(seed).shuffle(order)
        num_updates = -(-len(order) // batch_size)
        self._tell_small(len(order), batch_size)
        update_of: dict[int, int] = {}
        rank_of: dict[int, int] = {}
        for update in range(num_updates):
            members = sorted(order[update::num_updates])
            ranks = balance([lengths[i] for i in members], self._groups.data_size)
            for member, rank in zip(members, ranks, strict=True):
                update_of[ids[member]], rank_of[ids[member]] = update, rank
        mine = exchange_samples(
            samples, [rank_of[s.sample_id] for s in samples], self._groups.data_group, self._device
        )
        parts: list[list[Sample]] = [[] for _ in range(num_updates)]
        for sample in mine:
            parts[update_of[sample.sample_id]].append(sample)
        return [self.pack(part, seed + update) for update, part in enumerate(parts)]

    def pack(self, samples: Sequence[Sample], seed: int) -> list[PackedBatch]:
        """Best-fit bins of at most ``bin_tokens`` tokens, in shuffled order."""
        if not samples:
            return []
        bins = pack([sample.length for sample in samples], self._bin_tokens, seed)
        return [
            collate([samples[i] for i in members], self._device, self._round_to) for members in bins
        ]

    def _tell_small(self, count: int, batch_size: int) -> None:
        """Once in a launch: that updates are noisier than asked for is in the metrics of every step."""
        if 2 * count >= batch_size or self._told:
            return
        self._told = True
        logger.warning(
            "an update has %d samples instead of --global-batch-size %d: the step's others carry no signal or no grade "
            "(training/signal_share); use tasks that are neither too easy nor too hard, or more of them a step",
            count,
            batch_size,
        )

    def _global_lengths(self, samples: Sequence[Sample]) -> tuple[list[int], list[int]]:
        """Ids and lengths of all ranks' samples, the same list on every rank."""
        local = torch.tensor([(s.sample_id, s.length) for s in samples], dtype=torch.int64).view(-1)
        table = torch.cat(gather_vectors(local, self._groups.data_group)).view(-1, 2).tolist()
        table.sort()
        return [row[0] for row in table], [row[1] for row in table]
