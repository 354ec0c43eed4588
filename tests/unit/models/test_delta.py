"""The gated delta rule: by hand, its two ways against each other, and what the rollout engine makes of its states."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_rl.families import ModelLayout, Stages
from megatron_rl.inference.engine import EngineOptions
from megatron_rl.inference.kv_cache import build_cache
from megatron_rl.inference.sequence import SequenceGroup
from megatron_rl.models.delta_rule import Chunks, DeltaInputs, convolved, convolved_step, delta_rule, delta_step
from megatron_rl.models.gpt import rollout_mode
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.types import Hints, Place
from tests.support.generation import (
    drain,
    drain_with_pauses,
    generate,
    largest_gap,
    ragged_requests,
    request,
    rollout_engine,
    tokens,
)
from tests.support.tape import taped
from tests.support.tiny import DELTA, DELTA_EXPERTS, tiny_config, tiny_policy

CPU = torch.device("cpu")
LENGTHS = (70, 1, 130, 64, 3)
EVERYTHING = torch.ones(1, dtype=torch.bool)


def random_inputs(tokens: int) -> DeltaInputs:
    """2 key heads of width 4, 4 value heads of width 6."""
    draw = torch.Generator().manual_seed(3)
    query, key = torch.randn(2, tokens, 2, 4, generator=draw) / 2
    value = torch.randn(tokens, 4, 6, generator=draw)
    strength, decay = torch.rand(2, tokens, 4, generator=draw)
    return DeltaInputs(query, key, value, strength, -decay / 8)


def test_three_tokens_by_hand() -> None:
    """Key width 2, value width 1. Each line: S decays by 1/2 from the second token on, then a key is written.

    k = (1, 0), v = 4, b = 1/2:  S = (2, 0);                              q = (1, 1) reads 2
    k = (0, 1), v = 6, b = 1:    S = (1, 0) + (0, 6 - 0)   = (1, 6);      q = (1, 1) reads 7
    k = (1, 0), v = 3, b = 1:    S = (1/2, 3) + (3 - 1/2, 0) = (3, 3);    q = (1, -2) reads -3
    """
    query, key = torch.tensor([[1.0, 1], [1, 1], [1, -2]]), torch.tensor([[1.0, 0], [0, 1], [1, 0]])
    inputs = DeltaInputs(
        query[:, None], key[:, None], torch.tensor([4.0, 6, 3])[:, None, None], torch.tensor([[0.5], [1], [1]]),
        torch.tensor([[0.0], [0.5], [0.5]]).log().nan_to_num(neginf=0.0),
    )  # fmt: skip
    output, state = delta_rule(inputs, Chunks.of([3], 3, CPU))
    assert output.flatten().tolist() == pytest.approx([2, 7, -3])
    assert state.flatten().tolist() == pytest.approx([3, 3])
    held, seen = torch.zeros(1, 1, 2, 1), []
    for token in range(3):
        seen.append(delta_step(DeltaInputs(*(each[token : token + 1] for each in inputs)), held, EVERYTHING).item())
    assert seen == pytest.approx([2, 7, -3]) and held.flatten().tolist() == pytest.approx([3, 3])


def test_chunks_are_the_steps_and_begin_anew_with_each_sequence() -> None:
    inputs = random_inputs(sum(LENGTHS))
    before = torch.randn(len(LENGTHS), 4, 4, 6, generator=torch.Generator().manual_seed(4))
    output, states = delta_rule(inputs, Chunks.of(LENGTHS, 3, CPU), before)
    at = 0
    for length, held, state in zip(LENGTHS, before.clone(), states, strict=True):
        for token in range(at, at + length):
            step = delta_step(DeltaInputs(*(each[token : token + 1] for each in inputs)), held[None], EVERYTHING)
            assert torch.allclose(output[token], step[0], atol=1e-5)
        assert torch.allclose(state, held, atol=1e-5)
        at += length


def test_the_convolution_begins_anew_with_each_sequence_and_goes_on_in_steps() -> None:
    draw = torch.Generator().manual_seed(5)
    inputs, weight = torch.randn(sum(LENGTHS), 8, generator=draw), torch.randn(8, 1, 4, generator=draw)
    turned, past = convolved(inputs, weight, Chunks.of(LENGTHS, 3, CPU))
    for start, length, left in zip((0, 70, 71, 201, 265), LENGTHS, past, strict=True):
        held = torch.zeros(1, 3, 8)
        for token in range(start, start + length):
            step = convolved_step(inputs[token : token + 1], weight, held, EVERYTHING)
            assert torch.allclose(turned[token], step[0], atol=1e-5)
        assert torch.equal(held[0], left)


def test_rows_that_are_not_alive_keep_their_states() -> None:
    inputs, alive = random_inputs(2), torch.tensor([True, False])
    state, past = torch.ones(2, 4, 4, 6), torch.ones(2, 3, 8)
    delta_step(inputs, state, alive)
    convolved_step(torch.zeros(2, 8), torch.ones(8, 1, 4), past, alive)
    assert torch.equal(state[1], torch.ones(4, 4, 6)) and torch.equal(past[1], torch.ones(3, 8))
    assert not torch.equal(state[0], torch.ones(4, 4, 6)) and past[0, -1].sum() == 0


@pytest.fixture(scope="module")
def policy(one_rank: ParallelGroups):
    return tiny_policy(tiny_config(**DELTA_EXPERTS, seq_length=64))


def alone(policy, requests, **options):
    """Each request in an engine of its own rows, one after the other: nothing is reused, preempted, cut or moved."""
    engine = rollout_engine(policy, max_batch_size=4, prefix_reuse=False, **options)
    return [generate(policy, engine, [wanted])[0] for wanted in requests]


@pytest.mark.parametrize("backend", ["sdpa", "paged"])
def test_groups_short_chunks_and_moves_change_nothing(one_rank: ParallelGroups, backend: str) -> None:
    """Prompts in chunks of 3 tokens beside rows that decode, samples that copy a state, rows that change places."""
    policy = tiny_policy(tiny_config(**DELTA, seq_length=64, attention_backend=backend))
    requests = ragged_requests(9, 4, longest_prompt=20, max_new_tokens=14)
    engine = rollout_engine(policy, max_batch_size=7, prefill_token_budget=3, decode_steps_per_sync=2)
    found, wanted = generate(policy, engine, requests), alone(policy, requests)
    assert tokens(found) == tokens(wanted)
    assert largest_gap(found, wanted) < 5e-5


def conversations(policy, lasting, turns: int = 6, with_graphs: bool = False, **options):
    """Three conversations at once, of ``turns`` that answer with ``lasting`` tokens each and hear five more."""
    engine, said = rollout_engine(policy, stop_ids=(), max_batch_size=4, max_sequence_length=128, **options), []
    if with_graphs:
        taped(engine, policy, key_lengths=(64, 128))
    heard = [tuple((7 * row + 3 * i) % 20 + 4 for i in range(20)) for row in range(3)]
    with rollout_mode(policy):
        engine.begin(1, 0)
        for turn in range(turns):
            asked = [
                replace(
                    request(ids, 1, row, max_new_tokens=new), hints=Hints(goes_on=True), place=Place(turn=turn)
                ) for row, (ids, new) in enumerate(zip(heard, lasting, strict=True))
            ]  # fmt: skip
            for one in asked:
                engine.submit(one)
            said.append(drain(engine, asked))
            answers = (answer[0].token_ids for answer in said[-1])
            heard = [ids + new + (turn + 4, 5, 6, 7, 8) for ids, new in zip(heard, answers, strict=True)]
    return [answers for turn in said for answers in turn], engine.statistics


@pytest.mark.parametrize(("backend", "with_graphs"), [("sdpa", False), ("paged", False), ("paged", True)])
def test_a_turn_computes_its_new_tokens_alone(one_rank: ParallelGroups, backend: str, with_graphs: bool) -> None:
    """By hand: 20 tokens, then in each of 5 turns the last one drawn and 5 that are heard; 20 + 5 x 6 = 50.

    Without snapshots a conversation that draws n a turn computes 6 x 20 + (1 + .. + 5) x (n + 5). All three run in
    bursts of up to 8 steps, in the middle of which some of them end.
    """
    policy = tiny_policy(tiny_config(**DELTA, seq_length=128, attention_backend=backend))
    found, counts = conversations(policy, (6, 7, 9), with_graphs=with_graphs)
    wanted, whole = conversations(policy, (6, 7, 9), prefix_reuse=False)
    assert tokens(found) == tokens(wanted)
    assert largest_gap(found, wanted) < 5e-5
    assert counts.prefill_tokens == 3 * 50
    assert whole.prefill_tokens == 3 * 120 + 15 * (11 + 12 + 14) == counts.prefill_tokens + counts.reused_tokens


def test_snapshots_are_void_when_a_rollout_begins(policy) -> None:
    """Keys and values of the first prompt are computed anew; a snapshot at its end would be of the old weights."""
    engine = rollout_engine(policy, max_batch_size=4)
    first = replace(request(range(4, 24), 1, max_new_tokens=8), hints=Hints(goes_on=True))
    longer, other = (replace(first, prompt_ids=first.prompt_ids + heard) for heard in ((4,) * 8, (5,) * 8))
    generate(policy, engine, [first])
    generate(policy, engine, [longer], version=1)
    with rollout_mode(policy):
        engine.submit(other)
        drain(engine, [other])
    assert engine.statistics.reused_tokens == 0
    with rollout_mode(policy):
        for asked in (first, other):
            engine.submit(asked)
            drain(engine, [asked])
    assert engine.statistics.reused_tokens == 20


@pytest.mark.parametrize("backend", ["sdpa", "paged"])
def test_stages_go_on_at_the_same_place_with_states_or_without(one_rank: ParallelGroups, backend: str) -> None:
    """The second of two stages keeps no states: on its own it would go on anywhere, and compute other tokens."""
    shape = DELTA | {"num_layers": 4, "linear_attention_freq": 2, "attention_backend": backend}
    whole, pages = tiny_policy(tiny_config(**shape, seq_length=64)), 4 if backend == "paged" else None
    ids = tuple(range(4, 28))
    for stage, states in enumerate((2, 0)):
        layout = ModelLayout.of(whole.layout.architecture, stage=stage, stages=Stages(2, first=3))
        assert len(layout.state_layers) == states
        cache, blocks, rows = build_cache(replace(whole, layout=layout), EngineOptions(4, 64, block_size=pages))
        assert rows == 4 and (cache.states is not None) == (states > 0)
        sequences = SequenceGroup(0, request(ids), [0]).sequences
        assert blocks.allocate(sequences, [0, 1, 2, 3], 1).reused == 0
        blocks.remember(sequences, ids)
        assert blocks.num_cached((*ids, 5, 6, 7, 8, 9, 10, 11, 12)) == 24
        assert blocks.num_cached((*ids[:20], 5, 6, 7, 8, 9, 10, 11, 12)) == 0, "its history was rewritten"


def test_whoever_is_preempted_goes_on_from_its_prompt(one_rank: ParallelGroups) -> None:
    policy = tiny_policy(tiny_config(**DELTA, seq_length=64, attention_backend="paged"))
    requests = ragged_requests(6, 2, longest_prompt=24, max_new_tokens=24)
    budget = 24 * 4 * 2 * 2 * 8 * 4 + 16 * policy.layout.state_bytes(4)  # bytes: 24 blocks of 4, and 8 states twice
    engine = rollout_engine(
        policy, stop_ids=(), max_batch_size=8, block_size=4, kv_overcommit=8.0, cache_budget_gb=budget / 2**30
    )
    found, wanted = generate(policy, engine, requests), alone(policy, requests, stop_ids=())
    assert engine.max_batch_size == 8 and engine.statistics.preemptions > 0 and engine.statistics.reused_tokens > 0
    assert tokens(found) == tokens(wanted)
    assert largest_gap(found, wanted) < 5e-5


def test_interrupted_rollouts_go_on(policy) -> None:
    requests = ragged_requests(5, 2, longest_prompt=12, max_new_tokens=20)
    engine = rollout_engine(policy, max_batch_size=4, decode_steps_per_sync=1)
    wanted = generate(policy, engine, requests)
    with rollout_mode(policy):
        engine.begin(1, 0)
        for request in requests:
            engine.submit(request)
        found = drain_with_pauses(engine, requests, 1)
    assert tokens(found) == tokens(wanted)
    assert largest_gap(found, wanted) < 5e-5


def test_a_state_has_its_bytes(policy) -> None:
    """By hand: 4 heads of 6 x 8 in fp32 and 3 tokens of 2 x 12 + 32 channels a layer, and there are two."""
    assert policy.layout.state_bytes(4) == 2 * (4 * 4 * 48 + 3 * 56 * 4)
    assert policy.layout.state_bytes(2) == 2 * (4 * 4 * 48 + 3 * 56 * 2)
    assert policy.layout.slot_numbers(5) == 5 * 2 * 2 * 8
    for reuses in (False, True):  # with a snapshot for each row, or without
        held = rollout_engine(policy, max_batch_size=3, prefix_reuse=reuses).cache.states.tensors
        assert sum(t.numel() * t.element_size() for t in held) == (3 + 3 * reuses) * policy.layout.state_bytes(4)
