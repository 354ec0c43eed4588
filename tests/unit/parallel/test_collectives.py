"""Host-side exchanges on two and three ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_rl.platform.collectives import (
    any_rank,
    broadcast_json,
    gather_json,
    gather_vectors,
    max_over,
)
from tests.support.ranks import joined, run_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_on_ranks(num_ranks: int) -> None:
    run_ranks("tests.unit.parallel.test_collectives:on_rank", num_ranks)


def on_rank() -> None:
    with joined() as (rank, num_ranks):
        _flags_and_maxima(rank, num_ranks)
        _vectors(rank, num_ranks)
        _json(rank, num_ranks)


def _flags_and_maxima(rank: int, num_ranks: int) -> None:
    world, last = dist.group.WORLD, num_ranks - 1
    assert any_rank(rank == last)
    assert not any_rank(False)
    assert any_rank(True, world)
    assert max_over({"a": rank, "b": -rank}, world) == {"a": last, "b": 0.0}


def _vectors(rank: int, num_ranks: int) -> None:
    """Rank r has r numbers: the first one has none."""
    parts = gather_vectors(torch.arange(rank) + 10 * rank, dist.group.WORLD)
    assert [part.tolist() for part in parts] == [[10 * r + i for i in range(r)] for r in range(num_ranks)]
    assert all(part.numel() == 0 for part in gather_vectors(torch.zeros(0), dist.group.WORLD))
    exact = torch.tensor([1 / 3, 2.0**60], dtype=torch.float64)
    assert all(torch.equal(part, exact) for part in gather_vectors(exact, dist.group.WORLD))


def _json(rank: int, num_ranks: int) -> None:
    value = {"rank": rank, "text": "ü" * rank, "nothing": None}
    everybody = gather_json(value, dist.group.WORLD)
    assert everybody == [{"rank": r, "text": "ü" * r, "nothing": None} for r in range(num_ranks)]
    source = num_ranks - 1
    assert broadcast_json(value if rank == source else None, source) == everybody[source]
