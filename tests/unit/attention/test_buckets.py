"""Sequences padded in buckets of similar length: the cheapest cuts, and the same results as one set of rows."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.models.attention import padded
from megatron_rl.models.attention.backends.sdpa import packed_attention
from megatron_rl.models.attention.padded import BUCKET_CELLS, Buckets, PaddedRows, cheapest_borders

HEADS, GROUPS, WIDTH = 4, 2, 8


def buckets_of(lengths: list[int]) -> Buckets:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return Buckets.build(lengths, cu_seqlens, torch.cat([torch.arange(length) for length in lengths]))


def work(lengths: list[int], borders: tuple[int, ...], bucket_cells: int = BUCKET_CELLS) -> int:
    cells = [(b - a) * max(16, *lengths[a:b]) ** 2 for a, b in itertools.pairwise(borders)]
    return sum(cells) + len(cells) * bucket_cells


def test_long_and_short_ones_part() -> None:
    # together 60 x 50^2 = 150,000 cells; apart 20 x 50^2 + 40 x 16^2 = 60,240 and one more call
    assert cheapest_borders([50] * 20 + [10] * 40, BUCKET_CELLS) == [0, 20, 60]


def test_what_saves_less_than_a_call_costs_stays_together() -> None:
    assert cheapest_borders([50] * 64, BUCKET_CELLS) == [0, 64]
    few = (BUCKET_CELLS - 1) // (50**2 - 16**2)
    assert cheapest_borders([50] * 20 + [10] * few, BUCKET_CELLS) == [0, 20 + few]
    assert cheapest_borders([50] * 20 + [10] * (few + 1), BUCKET_CELLS) == [0, 20, 21 + few]


def test_no_other_cuts_are_cheaper() -> None:
    draw = random.Random(1)
    for _ in range(20):
        lengths = [draw.randint(1, 40) for _ in range(draw.randint(1, 9))]
        inner = range(1, len(lengths))
        every = [
            (0, *cut, len(lengths)) for count in range(len(lengths)) for cut in itertools.combinations(inner, count)
        ]
        found = cheapest_borders(lengths, 300)
        assert found[0] == 0 and found[-1] == len(lengths)
        assert work(lengths, tuple(found), 300) == min(work(lengths, borders, 300) for borders in every)


def test_many_lengths_are_looked_at_in_steps() -> None:
    lengths = list(range(2000, 0, -1))
    found = cheapest_borders(lengths, BUCKET_CELLS)
    assert sorted(set(found)) == found and found[-1] == 2000
    assert 3 < len(found) <= padded.MAX_BORDERS + 2
    assert work(lengths, tuple(found)) < work(lengths, (0, 2000)) / 2


@pytest.mark.parametrize(
    ("lengths", "full"),
    [
        ([40, 33, 33, 9, 3, 1], None),
        ([3, 40, 2, 1], None),
        ([20, 20, 20], [True]),
        ([20, 20, 18, 18], [True, True]),
        ([9, 9], [False]),  # filled up to the fewest keys of a product
    ],
)
def test_same_bits_as_one_set_of_rows(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], full: list[bool] | None
) -> None:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    whole = Buckets((PaddedRows.build(lengths, cu_seqlens),), (sum(lengths),))
    monkeypatch.setattr(padded, "BUCKET_CELLS", 1)
    bucketed = buckets_of(lengths)
    assert full is None or [rows.is_full for rows in bucketed.rows] == full
    assert sum(bucketed.tokens) == sum(lengths)
    generator = torch.Generator().manual_seed(7)
    fused = torch.randn(sum(lengths), 1, GROUPS, (HEADS // GROUPS + 2) * WIDTH, generator=generator)
    weight = torch.randn(sum(lengths), 1, HEADS * WIDTH, generator=generator)
    results = []
    for prepared in (bucketed, whole):
        leaf = fused.clone().requires_grad_()
        query, key, value = leaf.split([HEADS // GROUPS * WIDTH, WIDTH, WIDTH], dim=-1)  # strided, as in a layer
        output = packed_attention(query.reshape(-1, 1, HEADS, WIDTH), key, value, prepared)
        (output * weight).sum().backward()
        results.append(SimpleNamespace(output=output, grad=leaf.grad))
    assert torch.equal(results[0].output, results[1].output)
    torch.testing.assert_close(results[0].grad, results[1].grad, rtol=1e-5, atol=1e-6)


def test_equal_lengths_take_one_set_of_rows() -> None:
    assert len(buckets_of([20] * 8).rows) == 1
