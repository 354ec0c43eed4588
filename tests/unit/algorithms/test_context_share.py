"""How sequences are cut for context-parallel ranks: by hand, and what holds of any lengths."""

from __future__ import annotations

import random

import pytest
import torch

from megatron_rl.algorithms.context import ContextShare


def shares(lengths: list[int], size: int) -> list[ContextShare]:
    return [ContextShare.of(lengths, rank, size) for rank in range(size)]


def test_by_hand_two_ranks() -> None:
    """Five tokens are 0 1 | 2 | 3 | 4; of three the odd ones begin at rank 1: 5 | 6 | 7 | none."""
    first, second = shares([5, 3], 2)
    assert first.local.tolist() == [0, 1, 5, 4]
    assert second.local.tolist() == [2, 6, 3, 7]
    assert first.restore.tolist() == second.restore.tolist() == [0, 1, 4, 6, 3, 2, 5, 7]
    assert (first.query_lengths, first.key_lengths) == ((2, 1, 1), (2, 1, 5))
    assert (second.query_lengths, second.key_lengths) == ((1, 1, 1, 1), (3, 2, 4, 3))
    assert first.query_borders.tolist() == [0, 2, 3, 4] and first.key_borders.tolist() == [0, 2, 3, 8]
    # tokens 0 1, then 5, then 0 1 2 3 4, as places among 0 1 5 4 2 6 3 7
    assert first.keys.tolist() == [0, 1, 2, 0, 1, 4, 6, 3]


def test_by_hand_sequences_shorter_than_the_chunks() -> None:
    """One token each: the ranks take them in turn, and none is in two places."""
    first, second = shares([1, 1, 2], 2)
    assert first.local.tolist() == [0, 2] and second.local.tolist() == [1, 3]
    assert first.key_lengths == (1, 1) and second.key_lengths == (1, 2)


def test_by_hand_an_empty_sequence_is_nowhere() -> None:
    first, second = shares([0, 4, 0], 2)
    assert first.local.tolist() == [0, 3] and second.local.tolist() == [1, 2]
    assert second.key_lengths == (2, 3)


def test_tokens_that_the_ranks_cannot_share_equally_are_refused() -> None:
    with pytest.raises(ValueError, match="5 tokens for 2 context-parallel ranks; fill them up to a multiple of 2"):
        ContextShare.of([5], 0, 2)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_every_token_is_on_one_rank_and_sees_what_is_before_it(size: int) -> None:
    draw = random.Random(size)
    for _ in range(20):
        lengths = [draw.randint(0, 9) for _ in range(draw.randint(1, 12))]
        lengths.append(-sum(lengths) % size)
        if not sum(lengths):
            continue
        sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        every = shares(lengths, size)
        cells = torch.cat([share.local for share in every])
        assert cells[every[0].restore].tolist() == list(range(sum(lengths)))
        for share in every:
            assert share.local.numel() == sum(lengths) // size
            pieces = zip(
                share.local.split(share.query_lengths), cells[share.keys].split(share.key_lengths), strict=True
            )
            for queries, keys in pieces:
                start = int((sequence < sequence[keys[0]]).sum())
                assert keys.tolist() == list(range(start, int(queries[-1]) + 1))
                assert queries.tolist() == keys.tolist()[-len(queries) :]


@pytest.mark.parametrize("size", [2, 8])
def test_each_rank_has_its_share_of_the_work(size: int) -> None:
    """Pairs of a query and a key; chunks of the packed batch would give the busiest of 8 ranks twice its share."""
    draw = random.Random(0)
    lengths = [int(draw.lognormvariate(6, 0.9)) + 1 for _ in range(40)]
    lengths.append(-sum(lengths) % size)
    pairs = [
        sum(q * k - q * (q - 1) // 2 for q, k in zip(share.query_lengths, share.key_lengths, strict=True))
        for share in shares(lengths, size)
    ]
    assert max(pairs) * size < 1.01 * sum(pairs)
