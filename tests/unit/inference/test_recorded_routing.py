"""The experts that a rollout chose: recorded beside keys and values, whatever becomes of the rows.

Without quantisation the trainer chooses the same experts for the same tokens, so what was recorded is compared with
that: every token of every layer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from megatron_rl.families import LayerCache
from megatron_rl.inference.kv_cache import Cache, PagedCache, RowCache
from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.models.gpt import PolicyModel, rollout_mode
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.journal import completion_of, described
from megatron_rl.types import Completion, Hints, Place, Request
from tests.support.generation import (
    drain,
    generate,
    letters,
    ragged_requests,
    randomise_vectors,
    request,
    rollout_engine,
)
from tests.support.scoring import own_experts, packed, routing_of
from tests.support.tiny import tiny_config, tiny_policy
from tests.support.tokens import padding_of

MIXTURE = {"add_qkv_bias": False, "qk_layernorm": True, "num_layers": 3, "num_experts": 8, "moe_ffn_hidden_size": 24,
           "moe_router_topk": 3, "rl_router_replay": True}  # fmt: skip


def mixture(**changes: object) -> PolicyModel:
    """A model whose experts and norms matter."""
    policy = tiny_policy(tiny_config(**MIXTURE | changes))
    randomise_vectors(policy)
    return policy


@pytest.fixture(scope="module", params=["sdpa", "paged", "sdpa, loop"])
def policy(one_rank: object, request: pytest.FixtureRequest) -> PolicyModel:
    backend, _, loop = request.param.partition(", ")
    return mixture(attention_backend=backend, no_moe_grouped_gemm=bool(loop))


def wanting(requests: Sequence[Request]) -> list[Request]:
    return [replace(wanted, hints=Hints(wants_routing=True)) for wanted in requests]


def recording(policy: PolicyModel, **options: object) -> RolloutEngine:
    return rollout_engine(policy, records_routing=True, **{"block_size": 4} | options)


def assert_recorded(
    policy: PolicyModel, one_rank: ParallelGroups, requests: Sequence[Request], groups: list[tuple[Completion, ...]]
) -> None:
    """Every token has the experts that the trainer chooses for it, but the last of a sequence, which has none."""
    batch = packed(requests, groups)
    own, unknown = own_experts(policy, one_rank, batch).sort(-1).values, torch.iinfo(routing_of(batch).dtype).max
    last = torch.zeros(batch.samples.token_ids.numel(), dtype=torch.bool)
    last[batch.packing.cu_seqlens[1:].long() - 1] = True
    fed = ~last
    fed[batch.samples.token_ids.numel() - padding_of(batch) :] = False
    assert (routing_of(batch)[:, ~fed] == unknown).all()
    recorded = routing_of(batch).long().sort(-1).values[:, fed]
    assert torch.equal(recorded, own[:, fed])
    # The comparison can fail: a neighbouring token's, or layer's, experts are others.
    assert (recorded[:, 1:] != recorded[:, :-1]).any(-1).float().mean() > 0.5
    assert (recorded[1:] != recorded[:-1]).any(-1).float().mean() > 0.5


@pytest.mark.each_value
@pytest.mark.parametrize(
    "options",
    [
        {"max_batch_size": 32},
        {"max_batch_size": 3, "decode_steps_per_sync": 3},
        {"max_batch_size": 5, "prefill_token_budget": 7},
        {"max_batch_size": 8, "prefix_reuse": False},
    ],
    ids=["at once", "refilled and compacted", "prompts in pieces", "nothing reused"],
)  # fmt: skip
def test_every_token_has_its_experts(policy: PolicyModel, one_rank: ParallelGroups, options: dict) -> None:
    requests = wanting(ragged_requests(7, num_samples=3, longest_prompt=24, max_new_tokens=20))
    groups = generate(policy, recording(policy, **options), requests)
    assert len({len(c.token_ids) for group in groups for c in group}) > 5
    assert_recorded(policy, one_rank, requests, groups)


def test_a_prompt_that_was_in_the_cache(policy: PolicyModel, one_rank: ParallelGroups) -> None:
    """More samples than rows: the later ones take the prompt, and its experts, from the cache."""
    requests = wanting([request([3 + i % 20 for i in range(32)], 9, max_new_tokens=12)])
    engine = recording(policy, max_batch_size=3)
    groups = generate(policy, engine, requests)
    assert engine.statistics.reused_tokens > 100
    assert_recorded(policy, one_rank, requests, groups)


def test_the_later_turns_of_a_conversation(policy: PolicyModel, one_rank: ParallelGroups) -> None:
    """The last turn has the experts of the whole conversation: the last token of the first turn is fed with it."""
    first = wanting(ragged_requests(2, num_samples=4, longest_prompt=16, max_new_tokens=14, seed=3))
    first = [replace(wanted, hints=replace(wanted.hints, goes_on=True)) for wanted in first]
    engine = recording(policy, max_batch_size=8, stop_ids=())
    with rollout_mode(policy):
        engine.begin(1, 0)
        for wanted in first:
            engine.submit(wanted)
        later = [
            replace(wanted, prompt_ids=wanted.prompt_ids + said.token_ids + (6, 11, 8), num_samples=1,
                    place=Place(sample, turn=1), index=10 * wanted.index + sample)
            for wanted, group in zip(first, drain(engine, first), strict=True)
            for sample, said in enumerate(group)
        ]  # fmt: skip
        for wanted in later:
            engine.submit(wanted)
        groups = drain(engine, later)
    assert engine.statistics.reused_tokens > 0
    assert_recorded(policy, one_rank, later, groups)


def test_a_sequence_that_made_room_and_came_back(one_rank: ParallelGroups) -> None:
    policy = mixture(attention_backend="paged")
    requests = wanting(ragged_requests(6, num_samples=4, longest_prompt=8, max_new_tokens=36))
    bytes_a_token = 4 * policy.layout.cache_numbers(1) + policy.layout.routing_bytes
    engine = recording(
        policy, max_batch_size=16, stop_ids=(), kv_overcommit=4.0, cache_budget_gb=41 * 4 * bytes_a_token / 2**30
    )
    groups = generate(policy, engine, requests)
    assert engine.statistics.preemptions > 0
    assert_recorded(policy, one_rank, requests, groups)


def test_a_sample_that_goes_on_with_newer_weights(one_rank: ParallelGroups) -> None:
    """All its tokens are fed again and have the newer weights' experts; a finished one keeps those of its own."""
    policy = mixture(attention_backend="sdpa")
    requests = wanting(ragged_requests(4, num_samples=3, longest_prompt=16, max_new_tokens=24))
    engine, finished = recording(policy, max_batch_size=12, decode_steps_per_sync=2), {}
    with rollout_mode(policy):
        engine.begin(1, 0)
        for wanted in requests:
            engine.submit(wanted)
        for _ in range(5):
            finished |= {wanted.index: wanted for wanted, _ in engine.step()}
        waiting = sorted(engine.interrupt(), key=lambda wanted: wanted.index)
    alone = [replace(wanted, num_samples=1) for wanted in waiting for _ in wanted.so_far]
    begun = [sample for wanted in waiting for sample in wanted.so_far]
    old = [(wanted, sample) for wanted, sample in zip(alone, begun, strict=True) if sample.finish_reason]
    assert 0 < len(old) < len(begun)
    assert {sample.routing is None for sample in begun if not sample.finish_reason} == {True}
    assert_recorded(policy, one_rank, [wanted for wanted, _ in old], [(sample,) for _, sample in old])
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.3 * weight.std() * torch.randn_like(weight))
    records = [json.loads(json.dumps(list(map(described, wanted.so_far)))) for wanted in waiting]
    waiting = [replace(wanted, so_far=tuple(completion_of(sample, wants_routing=True) for sample in record))
               for wanted, record in zip(waiting, records, strict=True)]  # fmt: skip
    with rollout_mode(policy):
        engine.begin(1, 1)
        for wanted in waiting:
            engine.submit(wanted)
        ended = [sample for group in drain(engine, waiting) for sample in group]
    new = [(wanted, sample) for wanted, sample in zip(alone, ended, strict=True) if sample.policy_version == 1]
    assert [sample for sample in ended if sample.policy_version == 0] == [sample for _, sample in old]
    assert any(sample.older for _, sample in new)
    assert_recorded(policy, one_rank, [wanted for wanted, _ in new], [(sample,) for _, sample in new])
    kept = [sample.routing for sample in ended if sample.policy_version == 0]
    assert all(torch.equal(known, sample.routing) for known, (_, sample) in zip(kept, old, strict=True))
    with pytest.raises(AssertionError):  # what is finished has other experts than the newer weights would choose
        assert_recorded(policy, one_rank, [wanted for wanted, _ in old], [(sample,) for _, sample in old])


def test_an_answer_cut_at_a_stop_string(policy: PolicyModel, one_rank: ParallelGroups) -> None:
    """Tokens behind the cut were fed, and are none of the sample's."""
    free = [request((4, 9, 17, 2), greedy=True, max_new_tokens=24)]
    ((whole,),) = generate(policy, rollout_engine(policy, stop_ids=()), free)
    requests = wanting([request((4, 9, 17, 2), greedy=True, max_new_tokens=24, stop=(letters(whole.token_ids)[4:6],))])
    ((cut,),) = groups = generate(policy, recording(policy, stop_ids=()), requests)
    assert len(cut.token_ids) < len(whole.token_ids)
    batch = packed(requests, groups)
    own = own_experts(policy, one_rank, batch)[:, : 3 + len(cut.token_ids)]
    assert torch.equal(routing_of(batch)[:, : own.shape[1]].long().sort(-1).values, own.sort(-1).values)


def test_only_who_wants_them_gets_them(policy: PolicyModel) -> None:
    """An evaluation's answers are read without; the tokens are those of an engine that records nothing."""
    requests = ragged_requests(4, num_samples=2, max_new_tokens=12)
    engine = recording(policy)
    plain = generate(policy, rollout_engine(policy, block_size=4), requests)
    without = generate(policy, engine, requests)
    reads = engine.statistics.host_reads
    recorded = generate(policy, engine, wanting(requests))
    assert plain == without == recorded  # routing is no part of the comparison
    assert engine.statistics.host_reads > reads
    assert {c.routing is None for group in without for c in group} == {True}
    assert {c.routing is None for group in recorded for c in group} == {False}


def test_a_budget_holds_the_experts_too(policy: PolicyModel) -> None:
    tokens = 4 * 48
    gigabytes = tokens * (4 * policy.layout.cache_numbers(1) + policy.layout.routing_bytes) / 2**30
    engine = recording(policy, max_batch_size=8, cache_budget_gb=gigabytes)
    assert policy.layout.routing_bytes == 3 * 3
    assert engine.cache.routing.nbytes == tokens * 9
    assert sum(tensor.nbytes for tensor in engine.cache_tensors) == gigabytes * 2**30


# -- the cache alone -----------------------------------------------------------------------------


@pytest.fixture(params=["rows", "pages"])
def cache(one_rank: object, request: pytest.FixtureRequest) -> Cache:
    """4 rows of 6 positions, 3 layers."""
    sizes = [LayerCache(2, 3, 3)] * 3, 4, 6
    numbers = torch.float32, torch.device("cpu")
    cache = RowCache(*sizes, *numbers) if request.param == "rows" else PagedCache(*sizes, 2, *numbers)
    cache.allocate_routing(mixture(num_experts=300).layout)
    return cache


def test_two_rows_exchange_their_experts(cache: Cache) -> None:
    rows, positions = torch.arange(4).repeat_interleave(6), torch.arange(6).repeat(4)
    experts = torch.randint(0, 300, (3, 24, 3))
    for layer, chosen in enumerate(experts):
        cache.write_routing(layer, cache.cells(rows, positions), chosen)
    held = [experts[:, 6 * row : 6 * row + 6].transpose(0, 1) for row in range(4)]
    for row, known in enumerate(cache.routing_of(range(4), [6] * 4)):
        assert torch.equal(known.long(), held[row])
    units = [torch.tensor([row]) if isinstance(cache, RowCache) else cache.table[row].long() for row in range(4)]
    cache.copy(torch.cat((units[1], units[3])), torch.cat((units[3], units[1])), length=6)
    for row, known in zip((3, 1, 0), cache.routing_of((3, 1, 0), (5, 6, 2)), strict=True):
        source = {3: 1, 1: 3, 0: 0}[row]
        assert torch.equal(known.long(), held[source][: known.shape[0]])
    assert cache.routing.dtype == torch.int16  # 300 experts
