"""Scheduling on a real model: whatever is cut, makes way or is found in the cache, the answers stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from megatron_rl.errors import EngineError
from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.models.gpt import PolicyModel, rollout_mode
from megatron_rl.types import Completion, Hints, Place, Request
from tests.support.generation import (
    drain,
    generate,
    largest_gap,
    letters,
    ragged_requests,
    randomise_vectors,
    request,
    rollout_engine,
    tokens,
)
from tests.support.tiny import tiny_config, tiny_policy
from tests.unit.inference.test_host_reads import watch

PROMPT = (4, 9, 17, 2)


def gigabytes(policy: PolicyModel, cells: int) -> float:
    """A budget of so many tokens."""
    return 4 * policy.layout.cache_numbers(cells) / 2**30


def assert_same(policy: PolicyModel, engine: RolloutEngine, wanted: list[Request]) -> None:
    """As a large engine of slots that computes every prompt whole."""
    plain = generate(policy, rollout_engine(policy, max_batch_size=32, prefix_reuse=False), wanted)
    groups = generate(policy, engine, wanted)
    assert tokens(groups) == tokens(plain)
    assert largest_gap(groups, plain) < 1e-5


# -- pages, pieces, pre-emption ------------------------------------------------------------------


def test_a_row_without_pages_reads_one_key_and_a_slot_keeps_its_place(either: PolicyModel, paged: PolicyModel) -> None:
    """Rows end one after the other and are moved only when an eighth has: the idle ones are computed meanwhile."""
    engine, seen = rollout_engine(either, stop_ids=(), max_batch_size=16), []
    wanted = [request(PROMPT, 1, index, max_new_tokens=4 + 6 * (index % 3)) for index in range(16)]
    with rollout_mode(either), torch.inference_mode():
        engine.begin(1, 0)
        for one in wanted:
            engine.submit(one)
        while engine.has_unfinished:
            engine.step()
            state = engine.runner.state
            seen += state.position[~state.alive].tolist()
            assert (state.position[state.alive] >= len(PROMPT)).all()
    assert len(seen) > 0
    assert max(seen) == 0 if either is paged else max(seen) >= len(PROMPT)



@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 1},
        {"block_size": 16, "max_batch_size": 3},
        {"block_size": 100, "decode_steps_per_sync": 1},
        {"block_size": 4, "prefill_token_budget": 5},
        {"block_size": 4, "prefill_token_budget": 1, "max_batch_size": 2},
    ],
    ids=str,
)
def test_sizes_of_a_paged_engine_change_no_token(paged: PolicyModel, options: dict[str, int]) -> None:
    wanted = ragged_requests(7, num_samples=3, longest_prompt=24, max_new_tokens=20)
    assert_same(paged, rollout_engine(paged, **options), wanted)


@pytest.mark.parametrize("overcommit", [1.0, 3.0])
@pytest.mark.parametrize("cells", [52, 96, 200])
def test_a_budget_changes_no_token(paged: PolicyModel, cells: int, overcommit: float) -> None:
    wanted = ragged_requests(7, num_samples=3, longest_prompt=24, max_new_tokens=20)
    options = {"block_size": 4, "cache_budget_gb": gigabytes(paged, cells), "kv_overcommit": overcommit}
    engine = rollout_engine(paged, decode_steps_per_sync=3, **options)
    assert_same(paged, engine, wanted)
    statistics = engine.statistics
    assert (statistics.preemptions > 0) == (overcommit > 1)
    assert (statistics.recomputed_tokens > 0) == (statistics.preemptions > 0)


def test_a_stop_string_over_the_border_of_a_pre_emption(paged: PolicyModel) -> None:
    free = ragged_requests(6, num_samples=2, longest_prompt=8, max_new_tokens=36)
    stops = [letters(group[0].token_ids[17:20]) for group in generate(paged, rollout_engine(paged, stop_ids=()), free)]
    wanted = [replace(r, sampling=replace(r.sampling, stop=(stop,))) for r, stop in zip(free, stops, strict=True)]
    options = {"block_size": 2, "cache_budget_gb": gigabytes(paged, 52), "kv_overcommit": 9.0}
    engine = rollout_engine(paged, stop_ids=(), decode_steps_per_sync=2, **options)
    plain = generate(paged, rollout_engine(paged, stop_ids=()), wanted)
    groups = generate(paged, engine, wanted)
    assert [(c.token_ids, c.finish_reason) for g in groups for c in g] == [
        (c.token_ids, c.finish_reason) for g in plain for c in g
    ]
    assert {c.finish_reason for g in groups for c in g} == {"stop_string", "length"}
    assert engine.statistics.preemptions > 0


def test_no_read_in_a_burst_over_pages(paged: PolicyModel) -> None:
    engine = rollout_engine(paged, block_size=4, cache_budget_gb=gigabytes(paged, 96), kv_overcommit=3.0)
    in_bursts: list[str] = []
    bursts = watch(engine.runner, "decode", in_bursts)
    generate(paged, engine, ragged_requests(7, num_samples=3, longest_prompt=24, max_new_tokens=20))
    assert engine.statistics.preemptions > 0
    assert len(bursts) > 5
    assert in_bursts == []


def test_pieces_of_a_prompt_while_others_decode(either: PolicyModel) -> None:
    short = [request((5 + i, 7), 2, i, max_new_tokens=30) for i in range(2)]
    long = request([3 + i % 20 for i in range(40)], 3, 2, max_new_tokens=6)
    engine = rollout_engine(either, stop_ids=(), prefill_token_budget=8, decode_steps_per_sync=2)
    with rollout_mode(either):
        engine.begin(1, 0)
        for wanted in short:
            engine.submit(wanted)
        engine.step()
        engine.submit(long)
        before = engine.statistics.prefill_tokens
        assert before == 4
        engine.step()
        assert engine.statistics.prefill_tokens - before == 8, "one piece a step"
        decoded = engine.statistics.decode_steps
        engine.step()
        assert engine.statistics.decode_steps == decoded + 2
        groups = drain(engine, [*short, long])
    assert engine.statistics.prefill_tokens == 4 + 40
    plain = generate(either, rollout_engine(either, stop_ids=(), prefix_reuse=False), [*short, long])
    assert tokens(groups) == tokens(plain)
    assert largest_gap(groups, plain) < 1e-5


def test_the_last_row_is_computed_alone(either: PolicyModel) -> None:
    """Rows of finished samples cost no more than the burst they finished in."""
    wanted = [request(PROMPT, 1, i, max_new_tokens=41 if i == 20 else 9) for i in range(32)]
    engine = rollout_engine(either, stop_ids=(), max_batch_size=32)
    generate(either, engine, wanted)
    assert engine.statistics.decode_rows == 8 * 32 + 4 * 32  # four rows: see FEWEST_ROWS


def test_where_work_stands_in_the_queue_changes_no_token(policy: PolicyModel) -> None:
    plain = ragged_requests(9, num_samples=2, max_new_tokens=20)
    hinted = [replace(r, place=Place(turn=i % 2), hints=Hints((i * 7) % 20 + 1)) for i, r in enumerate(plain)]
    engine = rollout_engine(policy, max_batch_size=4)
    assert tokens(generate(policy, engine, hinted)) == tokens(generate(policy, engine, plain))


# -- beginnings in the cache ---------------------------------------------------------------------


def two_turns(
    policy: PolicyModel, engine: RolloutEngine, first: list[Request], waves: Sequence[Sequence[int]] = ()
) -> tuple[list[Completion], int]:
    """Every sample hears three tokens and speaks again; all second turns, and the tokens prefilled for them.

    Those of a wave begin together, when those of the wave before are finished; without ``waves`` all of them do.
    """
    with rollout_mode(policy):
        engine.begin(1, 0)
        for wanted in first:
            engine.submit(wanted)
        later = []
        for wanted, group in zip(first, drain(engine, first), strict=True):
            for sample, said in enumerate(group):
                prompt = wanted.prompt_ids + said.token_ids + (6, 11, 8)
                numbers = {"num_samples": 1, "index": 100 * wanted.index + sample, "place": Place(sample, turn=1)}
                later.append(replace(wanted, prompt_ids=prompt, **numbers))
        before = engine.statistics.prefill_tokens
        turns = {}
        for wave in waves or [range(len(later))]:
            for place in wave:
                engine.submit(later[place])
            turns |= zip(wave, drain(engine, [later[place] for place in wave]), strict=True)
    return [turns[place][0] for place in range(len(later))], engine.statistics.prefill_tokens - before


@pytest.mark.parametrize("slots", [3, 8])
def test_a_later_turn_goes_on_from_the_cache(either: PolicyModel, slots: int) -> None:
    first = ragged_requests(2, num_samples=4, longest_prompt=16, seed=3, max_new_tokens=14)
    first = [replace(wanted, hints=Hints(goes_on=True)) for wanted in first]
    options = {"max_batch_size": slots, "block_size": 4, "stop_ids": ()}
    plain, everything = two_turns(either, rollout_engine(either, prefix_reuse=False, **options), first)
    engine = rollout_engine(either, **options)
    turns, computed = two_turns(either, engine, first)
    assert [turn.token_ids for turn in turns] == [turn.token_ids for turn in plain]
    assert largest_gap([turns], [plain]) < 1e-5
    if slots == 8:
        # The reply and the last token said are four; the rest of a page comes with them.
        whole_pages = 3 if either.attention.cache.layout == "blocks" else 0
        assert 8 * 4 <= computed <= 8 * (4 + whole_pages)
        assert computed + engine.statistics.reused_tokens == everything


@pytest.mark.parametrize("waves", [((4,), (3,), (2,), (1,), (0,)), ((3, 0), (4, 1), (2,))], ids=["alone", "together"])
def test_what_makes_room_for_another_turn_is_kept(policy: PolicyModel, waves: tuple[tuple[int, ...], ...]) -> None:
    """A turn decodes in the lowest row, and what was longer in that row must outlive the steps that compute it, idle.

    Of the turns together the second goes on from what the first has moved.
    """
    lengths = 30, 26, 22, 18, 18
    first = [request([n, *range(3, n)], 1, i, max_new_tokens=4) for i, n in enumerate(lengths)]
    first = [replace(wanted, hints=Hints(goes_on=True)) for wanted in first]
    plain, everything = two_turns(policy, rollout_engine(policy, prefix_reuse=False, stop_ids=()), first)
    engine = rollout_engine(policy, stop_ids=())
    turns, computed = two_turns(policy, engine, first, waves)
    assert [turn.token_ids for turn in turns] == [turn.token_ids for turn in plain]
    assert largest_gap([turns], [plain]) < 1e-5
    assert (computed, engine.statistics.reused_tokens) == (5 * 4, everything - 5 * 4)
    assert engine.statistics.decode_rows == 3 * (5 + 4 * len(waves))


def test_the_rest_of_a_group_takes_the_prompt_from_the_cache(either: PolicyModel) -> None:
    prompt = [3 + i % 20 for i in range(32)]
    wanted = [request(prompt, 9, max_new_tokens=12)]
    engine = rollout_engine(either, max_batch_size=3, block_size=4)
    assert_same(either, engine, wanted)
    assert engine.statistics.prefill_tokens < 32 + 8 * 4
    assert engine.statistics.prefill_tokens + engine.statistics.reused_tokens >= 3 * 32


def test_the_switch(either: PolicyModel) -> None:
    wanted = [request([3 + i % 20 for i in range(32)], 9, max_new_tokens=12)]
    engine = rollout_engine(either, max_batch_size=3, block_size=4, prefix_reuse=False)
    generate(either, engine, wanted)
    assert engine.statistics.reused_tokens == 0
    assert engine.statistics.prefill_tokens >= 3 * 32


def test_new_weights_find_nothing_in_the_cache(one_rank: object) -> None:
    for backend in ("sdpa", "paged"):
        policy = tiny_policy(tiny_config(attention_backend=backend))
        wanted = [request([3 + i % 20 for i in range(32)], 2, max_new_tokens=12)]
        engine = rollout_engine(policy, block_size=4)
        generate(policy, engine, wanted)
        randomise_vectors(policy)
        again = generate(policy, engine, wanted)
        assert engine.statistics.reused_tokens == 0
        assert again == generate(policy, rollout_engine(policy, block_size=4), wanted)


def test_nothing_is_found_after_an_abort(either: PolicyModel) -> None:
    wanted = [request([3 + i % 20 for i in range(32)], 2, max_new_tokens=12)]
    engine = rollout_engine(either, block_size=4)
    plain = generate(either, engine, wanted)
    with rollout_mode(either):
        engine.abort()
        for again in wanted:
            engine.submit(again)
        assert tokens(drain(engine, wanted)) == tokens(plain)
    assert engine.statistics.reused_tokens == 0


# -- what is refused -----------------------------------------------------------------------------


def test_pages_for_less_than_one_sequence_are_refused(paged: PolicyModel) -> None:
    with pytest.raises(EngineError, match="one sequence of 48 tokens in pages of 16 and .*buffer-size-gb .* or more"):
        rollout_engine(paged, block_size=16, cache_budget_gb=gigabytes(paged, 63))
    assert rollout_engine(paged, block_size=16, cache_budget_gb=gigabytes(paged, 64)).max_batch_size == 8


def test_slots_cannot_be_promised_twice(policy: PolicyModel) -> None:
    with pytest.raises(EngineError, match="--rl-kv-overcommit 2 needs a KV cache of pages"):
        rollout_engine(policy, kv_overcommit=2.0)
