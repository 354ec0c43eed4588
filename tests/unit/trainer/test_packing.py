"""Packing into bins and balancing over ranks."""

from __future__ import annotations

import random

import pytest

from megatron_rl.errors import ConfigError
from megatron_rl.trainer.packing import balance, pack


def rollout_lengths(count: int, seed: int = 0) -> list[int]:
    """Log-normal lengths, median 665, between 32 and 4,096 tokens."""
    generator = random.Random(seed)
    return [max(32, min(4096, int(generator.lognormvariate(6.5, 0.8)))) for _ in range(count)]


def test_a_sample_goes_into_the_fullest_bin_with_room() -> None:
    # 7 and 6 open bins with 3 and 4 left. The 3 goes to the 7, where it fits exactly, and leaves the 6 to
    # the two 2: in the emptiest bin, with the 6, it would have cost a third bin.
    assert sorted(map(sorted, pack([2, 7, 3, 2, 6], capacity=10))) == [[0, 3, 4], [1, 2]]


def test_every_sample_is_packed_once_and_bins_keep_their_capacity() -> None:
    lengths = rollout_lengths(300)
    bins = pack(lengths, capacity=4096)
    assert sorted(index for contents in bins for index in contents) == list(range(300))
    assert all(0 < sum(lengths[index] for index in contents) <= 4096 for contents in bins)


@pytest.mark.parametrize("seed", range(3))
def test_bins_are_nearly_full(seed: int) -> None:
    lengths = rollout_lengths(1024, seed)
    assert sum(lengths) / (4096 * len(pack(lengths, capacity=4096))) > 0.98


def test_the_order_of_bins_is_shuffled_by_the_seed() -> None:
    lengths = rollout_lengths(300)
    bins = pack(lengths, capacity=4096, seed=1)
    assert bins == pack(lengths, capacity=4096, seed=1)
    assert bins != pack(lengths, capacity=4096, seed=2)
    longest = [max(lengths[index] for index in contents) for contents in bins]
    assert longest != sorted(longest, reverse=True)
    # The longest samples are not all in the first half, as they are when sorted.
    half = len(bins) // 2
    assert abs(sum(longest[:half]) / half - sum(longest[-half:]) / half) < 0.3 * (sum(longest) / len(longest))


def test_a_sample_that_does_not_fit_is_named() -> None:
    with pytest.raises(ConfigError, match="sample 1 has 11 tokens"):
        pack([10, 11], capacity=10)


def test_nothing_needs_no_bins() -> None:
    assert pack([], capacity=10) == []
    assert balance([], 2) == []


def test_balance_by_hand() -> None:
    # 9 to rank 0, 8 to rank 1, 5 to rank 1 (13), 4 to rank 0 (13), 1 and 1 to one rank each: 14 and 14.
    ranks = balance([1, 9, 8, 5, 1, 4], 2)
    assert ranks[1:4] == [0, 1, 1]
    assert ranks[5] == 0
    assert ranks[0] != ranks[4]


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_ranks_get_equal_tokens_and_similar_numbers_of_samples(num_ranks: int) -> None:
    lengths = rollout_lengths(512)
    ranks = balance(lengths, num_ranks)
    tokens, counts = [0] * num_ranks, [0] * num_ranks
    for rank, length in zip(ranks, lengths, strict=True):
        tokens[rank] += length
        counts[rank] += 1
    assert max(tokens) < 1.01 * sum(tokens) / num_ranks
    assert max(counts) - min(counts) <= 2
    assert ranks == balance(lengths, num_ranks)


def test_every_rank_gets_a_sample_if_there_are_enough() -> None:
    assert sorted(balance([100_000, 1, 1, 1], 4)) == [0, 1, 2, 3]
    assert len(set(balance([5, 5], 4))) == 2
