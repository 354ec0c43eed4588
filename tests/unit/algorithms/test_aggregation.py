"""Reductions on one batch worked out by hand: two sequences and a padding sequence.

sequence   0  0  0  1  1  2
loss mask  0  1  1  0  1  0
"""

from __future__ import annotations

import pytest
import torch

from megatron_rl.algorithms.batch import Aggregation, token_weights, trusted_mask
from tests.support.tokens import token_batch

SEQUENCE = torch.tensor([0, 0, 0, 1, 1, 2])
MASK = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0])
BATCH = token_batch(SEQUENCE, MASK)


@pytest.mark.parametrize(
    ("kind", "expected_weights", "expected_denominator"),
    [
        ("token-mean", [0.0, 1.0, 1.0, 0.0, 1.0, 0.0], 3),
        ("sequence-mean", [0.0, 0.5, 0.5, 0.0, 1.0, 0.0], 2),
        ("constant", [0.0, 0.25, 0.25, 0.0, 0.25, 0.0], 2),
    ],
)
def test_weights_and_denominator(
    kind: Aggregation, expected_weights: list[float], expected_denominator: int
) -> None:
    weights, denominator = token_weights(kind, BATCH, constant=4.0)
    assert weights.tolist() == expected_weights
    assert denominator.dtype == torch.int64
    assert denominator.item() == expected_denominator


@pytest.mark.parametrize("kind", ["token-mean", "sequence-mean", "constant"])
def test_two_micro_batches_equal_one(kind: Aggregation) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 2, 9, 4])
    sequence = torch.arange(4).repeat_interleave(lengths)
    mask = (torch.rand(20, generator=generator) > 0.4).float()
    per_token = torch.randn(20, generator=generator)

    weights, denominator = token_weights(kind, token_batch(sequence, mask), constant=10.0)
    whole = (per_token * weights).sum() / denominator

    # Sequences 0, 1 with three tokens of padding, then 2, 3 without.
    first, second = slice(0, 7), slice(7, 20)
    pad = torch.zeros(3)
    padded = torch.cat([sequence[first], torch.full((3,), 2)])
    weights_1, denominator_1 = token_weights(kind, token_batch(padded, torch.cat([mask[first], pad])), constant=10.0)
    weights_2, denominator_2 = token_weights(kind, token_batch(sequence[second] - 2, mask[second]), constant=10.0)
    total = (torch.cat([per_token[first], pad]) * weights_1).sum() + (per_token[second] * weights_2).sum()
    torch.testing.assert_close(total / (denominator_1 + denominator_2), whole)


def test_a_non_finite_logprob_leaves_mask_and_denominator() -> None:
    current = torch.tensor([torch.nan, -1.0, -torch.inf, -1.0, -1.0, -1.0])
    inference = torch.tensor([-1.0, -1.0, -1.0, -1.0, torch.nan, torch.nan])
    mask = trusted_mask(MASK, current, inference)
    # Loss tokens 2 and 4 are dropped; tokens 0 and 5 were no loss tokens to begin with.
    assert mask.tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    for kind in ("token-mean", "sequence-mean"):
        assert token_weights(kind, token_batch(SEQUENCE, mask), constant=1.0)[1].item() == 1


@pytest.mark.parametrize("kind", ["token-mean", "sequence-mean", "constant"])
def test_the_host_reads_nothing(kind: Aggregation) -> None:
    # A meta tensor has no values: a read raises, where on a GPU it would make the host wait.
    mask = trusted_mask(MASK.to("meta"), MASK.to("meta"))
    weights, denominator = token_weights(kind, token_batch(SEQUENCE.to("meta"), mask, lengths=(3, 2, 1)), constant=1.0)
    assert weights.is_meta
    assert denominator.is_meta


def test_sequence_means_are_over_loss_tokens() -> None:
    values = torch.tensor([torch.nan, 1.0, 4.0, 9.0, -3.0, torch.nan])
    assert BATCH.sequence_means(values).tolist() == [2.5, -3.0, 0.0]
    assert BATCH.sequence_sums(values).tolist() == [5.0, -3.0, 0.0]
