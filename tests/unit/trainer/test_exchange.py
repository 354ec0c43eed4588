"""Samples reach the rank they are sent to, whole and in order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_rl.algorithms.batch import Sample
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.batches import exchange_samples
from tests.support.ranks import joined, run_ranks


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_exchange(num_ranks: int) -> None:
    run_ranks("tests.unit.trainer.test_exchange:on_rank", num_ranks)


def on_rank() -> None:
    with joined() as (rank, num_ranks):
        _every_sample_arrives(rank, num_ranks)
        _ranks_may_have_nothing(rank, num_ranks)


def _every_sample_arrives(rank: int, num_ranks: int) -> None:
    # Ids fall with the rank that has them, so that the order of arrival is not the order of ids.
    all_samples = [_sample(100 - index) for index in range(11)]
    owner = [index % num_ranks for index in range(11)]
    destination = [(index // 2) % num_ranks for index in range(11)]
    mine = [index for index in range(11) if owner[index] == rank]

    received = exchange_samples(
        [all_samples[index] for index in mine], [destination[index] for index in mine], dist.group.WORLD
    )

    expected = [all_samples[index] for index in reversed(range(11)) if destination[index] == rank]
    assert [sample.sample_id for sample in received] == [sample.sample_id for sample in expected]
    for actual, sent in zip(received, expected, strict=True):
        for name, value in vars(sent).items():
            other = getattr(actual, name)
            assert type(other) is type(value), name
            if torch.is_tensor(value):
                assert other.dtype == value.dtype
                assert torch.equal(other, value), name
            else:
                assert other == value, name


def _ranks_may_have_nothing(rank: int, num_ranks: int) -> None:
    assert exchange_samples([], [], None) == []
    # The last rank has all samples and gives all away to the first.
    local = [_sample(2), _sample(1)] if rank == num_ranks - 1 else []
    received = exchange_samples(local, [0] * len(local), None)
    assert [sample.sample_id for sample in received] == ([1, 2] if rank == 0 else [])


def _sample(sample_id: int) -> Sample:
    """Of 2 to 6 tokens; without routing, or with one or two bytes an expert. The reward is one fp32 can hold."""
    generator = torch.Generator().manual_seed(sample_id)
    length = 2 + sample_id % 5
    dtype = (None, torch.uint8, torch.int16)[sample_id % 3]
    return Sample(
        token_ids=torch.randint(0, 2**40, (length,), generator=generator),
        loss_mask=torch.rand(length, generator=generator) > 0.5,
        inference_logprobs=-torch.rand(length, generator=generator),
        versions=torch.randint(0, 9, (length,), generator=generator),
        routing=None if dtype is None else torch.randint(0, 255, (length, 3, 2), generator=generator).to(dtype),
        reward=sample_id / 8,
        sample_id=sample_id,
        sequence=sample_id % 7,
        tokens_elsewhere=sample_id * 11,
        truncated=sample_id % 2 == 1,
        turn=torch.arange(-1, length - 1) if sample_id % 4 else None,
    )


def test_sequences_of_a_sample_stay_in_order(one_rank: ParallelGroups) -> None:
    local = [replace(_sample(2), sequence=number) for number in (2, 0, 1)]
    assert [one.sequence for one in exchange_samples(local, [0] * 3, one_rank.data_group)] == [0, 1, 2]


def test_one_rank_keeps_its_samples(one_rank: ParallelGroups) -> None:
    """In the order of their ids."""
    local = [_sample(2), _sample(1)]
    first, second = exchange_samples(local, [0, 0], one_rank.data_group)
    assert first is local[1]
    assert second is local[0]
