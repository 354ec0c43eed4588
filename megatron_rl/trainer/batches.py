"""Samples to packed micro-batches, balanced over the data-parallel ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from megatron_rl.packing.bins import balance, pack
from megatron_rl.packing.collate import collate
from megatron_rl.packing.exchange import exchange_samples
from megatron_rl.parallel import ParallelGroups
from megatron_rl.parallel.collectives import gather_vectors
from megatron_rl.types import PackedBatch, Sample


class BatchBuilder:
    """Splits a step's samples into updates, gives every rank about the same tokens, and packs."""

    def __init__(
        self, bin_tokens: int, round_to: int, device: torch.device, groups: ParallelGroups
    ) -> None:
        self._bin_tokens = bin_tokens
        self._round_to = round_to
        self._device = device
        self._groups = groups

    def updates(
        self, samples: Sequence[Sample], num_updates: int, seed: int
    ) -> list[list[PackedBatch]]:
        """Micro-batches of each of at most ``num_updates`` optimizer steps; collective.

        Samples are shuffled by ``seed`` into equal updates, then balanced by tokens over the
        ranks and exchanged, so a rank trains on samples it did not generate. Without samples there
        are no updates: an empty one would still move the weights by momentum and weight decay.
        """
        ids, lengths = self._global_lengths(samples)
        if not ids:
            return []
        order = list(range(len(ids)))
        random.Random(seed).shuffle(order)
        num_updates = max(1, min(num_updates, len(order)))
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

    def _global_lengths(self, samples: Sequence[Sample]) -> tuple[list[int], list[int]]:
        """Ids and lengths of all ranks' samples, the same list on every rank."""
        local = torch.tensor([(s.sample_id, s.length) for s in samples], dtype=torch.int64).view(-1)
        table = torch.cat(gather_vectors(local, self._groups.data_group)).view(-1, 2).tolist()
        table.sort()
        return [row[0] for row in table], [row[1] for row in table]
