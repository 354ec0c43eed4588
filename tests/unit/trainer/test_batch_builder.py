"""Samples to micro-batches over several ranks: balanced, nothing lost or doubled, always the same."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_rl.algorithms import TokenBatch
from megatron_rl.algorithms.batch import Sample
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.batches import BatchBuilder
from tests.support.ranks import joined, run_ranks
from tests.support.samples import make_sample

CPU = torch.device("cpu")
BIN_TOKENS = 64


@dataclass(frozen=True)
class Replicas:
    """As much of `ParallelGroups` as a batch builder asks for."""

    rollout_group: dist.ProcessGroup
    context_size: int = 1
    is_main: bool = True
    shares_experts: bool = False

    @property
    def data_group(self) -> SimpleNamespace:
        return SimpleNamespace(size=lambda: self.rollout_group.size() // self.context_size)

    @property
    def context_group(self) -> SimpleNamespace:
        rank = self.rollout_group.rank() % self.context_size
        return SimpleNamespace(rank=lambda: rank, size=lambda: self.context_size)


def make_samples(count: int) -> list[Sample]:
    """Of 2 to 60 tokens; every token is the sample's id, its log-probs and reward follow from it."""
    draw = random.Random(7)
    samples = []
    for index in range(count):
        length = draw.randint(2, 60)
        samples.append(make_sample(torch.full((length,), index), 1, float(index), -float(index), index))
    return samples


def make_branched(count: int, seed: int) -> list[Sample]:
    """Of one to four sequences each, of 2 to 60 tokens."""
    draw = random.Random(seed)
    samples = []
    for index in range(count):
        for number in range(draw.choice((1, 1, 2, 4))):
            tokens = torch.full((draw.randint(2, 60),), 100 * index + number)
            samples.append(make_sample(tokens, 1, 1.0, 0.0, index, sequence=number))
    return samples


def placed(updates: list[list[TokenBatch]]) -> list[list[tuple[int, int]]]:
    """Sample and number of the sequences of each update; checks that the tokens are theirs."""
    found: list[list[tuple[int, int]]] = []
    for update in updates:
        found.append([])
        for batch in update:
            numbers = list(zip(batch.samples.sample_id, batch.samples.sequence.tolist(), strict=False))
            own = batch.samples.token_ids.split(batch.packing.lengths)
            for (sample, number), tokens in zip(numbers, own, strict=False):
                assert tokens.tolist() == [100 * sample + number] * tokens.numel()
            found[-1] += numbers
    return found


def contents(updates: list[list[TokenBatch]]) -> list[list[list[int]]]:
    """Sample ids by update and micro-batch; checks that every sample arrived whole."""
    originals = make_samples(40)
    for batch in (batch for update in updates for batch in update):
        parts = batch.samples.token_ids.split(batch.packing.lengths)
        for sample_id, tokens, rewards, logprobs in zip(
            batch.samples.sample_id,
            parts,
            batch.rewards.split(batch.packing.lengths),
            batch.inference_logprobs.split(batch.packing.lengths),
            strict=False,  # a padding sequence at the end has no id
        ):
            assert torch.equal(tokens, originals[sample_id].token_ids)
            assert torch.equal(logprobs, originals[sample_id].inference_logprobs)
            assert rewards.tolist() == [0.0] * (tokens.numel() - 1) + [float(sample_id)]
    return [[list(batch.samples.sample_id) for batch in update] for update in updates]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_over_ranks(num_ranks: int) -> None:
    run_ranks("tests.unit.trainer.test_batch_builder:on_rank", num_ranks)


def on_rank() -> None:
    with joined() as (rank, num_ranks):
        builder = BatchBuilder(BIN_TOKENS, 4, CPU, Replicas(dist.group.WORLD))
        _everything_arrives_once_and_balanced(builder, rank, num_ranks)
        _fewer_samples_than_ranks(builder, rank)
        _sequences_of_a_sample_are_in_one_update(builder, rank, num_ranks)


def _everything_arrives_once_and_balanced(builder: BatchBuilder, rank: int, num_ranks: int) -> None:
    samples = make_samples(40)
    # The first rank has generated nearly everything: balancing is up to the builder.
    mine = [s for s in samples if (s.sample_id % 10 == 0) == (rank == num_ranks - 1) and rank in (0, num_ranks - 1)]
    updates = builder.updates(mine, batch_size=10, seed=3)
    again = builder.updates(mine, batch_size=10, seed=3)
    assert contents(updates) == contents(again)

    everybody: list = [None] * num_ranks
    dist.all_gather_object(everybody, contents(updates))
    tokens = {sample.sample_id: sample.length for sample in samples}
    for update in range(4):
        shares = [[i for batch in ids[update] for i in batch] for ids in everybody]
        assert sum(len(share) for share in shares) == 10
        loads = [sum(tokens[i] for i in share) for share in shares]
        assert max(loads) - min(loads) <= 60  # the longest sample: LPT cannot be further off
    flat = sorted(i for ids in everybody for update in ids for batch in update for i in batch)
    assert flat == list(range(40))
    # The updates are those of one rank with all samples: they do not depend on who generated what.
    alone = _updates_of_one_rank(samples)
    for update in range(4):
        assert sorted(i for ids in everybody for batch in ids[update] for i in batch) == alone[update]


def _sequences_of_a_sample_are_in_one_update(builder: BatchBuilder, rank: int, num_ranks: int) -> None:
    samples = make_branched(23, seed=0)
    updates = builder.updates([s for s in samples if s.sample_id % num_ranks == rank], batch_size=6, seed=3)
    everybody: list = [None] * num_ranks
    dist.all_gather_object(everybody, placed(updates))
    together = [sorted(key for own in everybody for key in own[update]) for update in range(len(updates))]
    assert_whole(together, samples, 6)
    of_ranks = [{sample for update in own for sample, _ in update} for own in everybody]
    assert of_ranks[0] & of_ranks[1], "none was shared out: the test shows nothing"


def assert_whole(updates: list[list[tuple[int, int]]], samples: list[Sample], batch_size: int) -> None:
    """Every sequence once, no sample in two updates, none of them larger than ``batch_size`` samples."""
    assert sorted(key for update in updates for key in update) == [(s.sample_id, s.sequence) for s in samples]
    members = [{sample for sample, _ in update} for update in updates]
    count = len({s.sample_id for s in samples})
    assert sum(map(len, members)) == count, "cut across updates"
    assert len(members) == -(-count // batch_size)
    assert {len(one) for one in members} <= {count // len(members), -(-count // len(members))}


def _updates_of_one_rank(samples: list[Sample]) -> list[list[int]]:
    order = list(range(len(samples)))
    random.Random(3).shuffle(order)
    return [sorted(order[update::4]) for update in range(4)]


def _fewer_samples_than_ranks(builder: BatchBuilder, rank: int) -> None:
    one = make_samples(1) if rank == 1 else []
    updates = builder.updates(one, batch_size=10, seed=3)
    assert len(updates) == 1  # on every rank, also where it is empty
    counts: list = [None] * dist.get_world_size()
    dist.all_gather_object(counts, len(updates[0]))
    assert sorted(counts) == [0] * (len(counts) - 1) + [1]
    assert builder.updates([], batch_size=10, seed=3) == []


def test_context_parallel_ranks_have_the_same_batches() -> None:
    """Wherever the samples were generated; of four ranks two are a replica, and each has its share of every batch."""
    replicas = run_ranks("tests.unit.trainer.test_batch_builder:on_context_rank", 4)
    for first, second in (replicas[:2], replicas[2:]):
        assert first["updates"] == second["updates"]
        for one, other, total in zip(first["tokens"], second["tokens"], first["totals"], strict=True):
            assert len(one) == len(other) == total // 2
            assert sorted(one + other) == list(range(total))
    trained = [i for replica in replicas[::2] for update in replica["updates"] for batch in update for i in batch]
    assert sorted(trained) == list(range(40))


def on_context_rank() -> dict[str, Any]:
    with joined() as (rank, _):
        builder = BatchBuilder(BIN_TOKENS, 2, CPU, Replicas(dist.group.WORLD, context_size=2))
        mine = [sample for sample in make_samples(40) if sample.sample_id % 3 == rank]  # the last has none
        updates = builder.updates(mine, batch_size=10, seed=3)
        batches = [batch for update in updates for batch in update]
        return {
            "updates": contents(updates),
            "tokens": [batch.packing.share.local.tolist() for batch in batches],
            "totals": [batch.samples.token_ids.numel() for batch in batches],
        }


def test_one_rank_updates_are_equal_parts(one_rank: ParallelGroups) -> None:
    builder = BatchBuilder(BIN_TOKENS, 1, CPU, one_rank)
    updates = contents(builder.updates(make_samples(40), batch_size=10, seed=3))
    flat = [sorted(i for batch in update for i in batch) for update in updates]
    assert flat == _updates_of_one_rank(make_samples(40))
    other = contents(builder.updates(make_samples(40), batch_size=10, seed=4))
    assert [sorted(i for batch in update for i in batch) for update in other] != flat


@pytest.mark.parametrize("seed", range(25))
def test_no_sample_is_cut_across_updates_and_none_is_lost(one_rank: ParallelGroups, seed: int) -> None:
    draw = random.Random(seed)
    samples, batch_size = make_branched(draw.randint(1, 30), seed), draw.randint(1, 12)
    updates = BatchBuilder(BIN_TOKENS, 4, CPU, one_rank).updates(samples, batch_size, seed)
    assert_whole(placed(updates), samples, batch_size)


@pytest.mark.parametrize(
    ("count", "batch_size", "sizes"),
    [
        (8, 64, [8]),
        (64, 64, [64]),
        (65, 64, [33, 32]),  # not 64 and 1
        (100, 64, [50, 50]),
        (128, 64, [64, 64]),
        (10, 3, [3, 3, 2, 2]),
    ],
)
def test_dropped_samples_make_fewer_updates_of_at_most_the_batch_size(
    one_rank: ParallelGroups, count: int, batch_size: int, sizes: list[int]
) -> None:
    updates = BatchBuilder(BIN_TOKENS, 1, CPU, one_rank).updates(make_samples(count), batch_size, seed=3)
    assert [sum(len(batch.samples.sample_id) for batch in update) for update in updates] == sizes


def test_an_update_below_half_the_batch_size_is_told_once(
    one_rank: ParallelGroups, caplog: pytest.LogCaptureFixture
) -> None:
    builder = BatchBuilder(BIN_TOKENS, 1, CPU, one_rank)
    for count in (0, 32, 31, 8):
        builder.updates(make_samples(count), 64, seed=3)
    (record,) = caplog.records
    assert "an update has 31 samples instead of --global-batch-size 64" in record.getMessage()


def test_bins_keep_to_the_token_limit_and_the_rounding(one_rank: ParallelGroups) -> None:
    builder = BatchBuilder(BIN_TOKENS, 8, CPU, one_rank)
    batches = builder.pack(make_samples(40), seed=0)
    total = sum(sample.length for sample in make_samples(40))
    assert all(sum(batch.packing.lengths) <= BIN_TOKENS and sum(batch.packing.lengths) % 8 == 0 for batch in batches)
    assert len(batches) <= 1.3 * total / BIN_TOKENS
    assert builder.pack([], seed=0) == []
