"""The last steps of a burst run while the host plans: rows that end in them are found a burst later, their tokens stay.

On a GPU it is a quarter of the steps; here as many as a test asks for, and the results are those of an engine that
waits for every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from megatron_rl.arithmetic import FEWEST_ROWS
from megatron_rl.inference.engine import EngineOptions
from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.models.gpt import PolicyModel, rollout_mode
from megatron_rl.platform.collectives import OneStage
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.types import Completion, Constraints, Hints, Place, Request
from tests.support.generation import (
    drain,
    generate,
    largest_gap,
    letters,
    randomise_vectors,
    request,
    rollout_engine,
    tokens,
)
from tests.support.tape import taped
from tests.support.tiny import DELTA, tiny_config, tiny_policy

PROMPT = (4, 9, 17, 2)
LATE = {"decode_steps_per_sync": 6, "overlap_steps": 2}


def bursts_of(engine: RolloutEngine) -> list[int]:
    """The steps of every call of the runner from now on: a burst is one, or two where its end is not awaited."""
    decode, steps = engine.runner.decode, list[int]()

    def noted(rows: int, key_length: int, count: int, *rest: object) -> object:
        steps.append(count)
        return decode(rows, key_length, count, *rest)

    engine.runner.decode = noted
    return steps


def prompt_of(index: int) -> list[int]:
    return [4 + (7 * index + place) % 20 for place in range(3 + index % 5)]


def many() -> list[Request]:
    """More than there are rows, with limits from 2 on; some end by a token before."""
    return [request(prompt_of(index), 3, index, max_new_tokens=2 + 5 * index % 31) for index in range(9)]


# -- the same completions ----------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [5, 8, 20])
def test_no_completion_changes(either: PolicyModel, rows: int) -> None:
    plain = generate(either, rollout_engine(either, max_batch_size=rows, block_size=4), many())
    for late in (1, 3, 5):
        options = {"max_batch_size": rows, "block_size": 4, "decode_steps_per_sync": 6, "overlap_steps": late}
        engine = rollout_engine(either, **options)
        bursts = bursts_of(engine)
        groups = generate(either, engine, many())
        assert [[c.finish_reason for c in g] for g in groups] == [[c.finish_reason for c in g] for g in plain]
        assert tokens(groups) == tokens(plain)
        assert largest_gap(groups, plain) < 1e-5
        assert len(bursts) > engine.statistics.host_reads, "every burst was waited for"
        assert engine.statistics.generated_tokens == sum(map(len, tokens(plain)))
    assert {c.finish_reason for g in plain for c in g} == {"stop", "length"}


def test_the_same_arithmetic_gives_the_same_bits(policy: PolicyModel) -> None:
    """Without refills the batches differ in idle rows alone."""
    wanted = [request(PROMPT, 1, index, max_new_tokens=16 + 5 * index) for index in range(6)]
    assert generate(policy, rollout_engine(policy, **LATE), wanted) == generate(policy, rollout_engine(policy), wanted)


def test_replayed_steps_are_read_late_too(either: PolicyModel) -> None:
    plain = generate(either, rollout_engine(either), many())
    engine = rollout_engine(either, **LATE)
    recorder, bursts = taped(engine, either), bursts_of(engine)
    groups = generate(either, engine, many())
    assert tokens(groups) == tokens(plain)
    assert largest_gap(groups, plain) < 1e-5
    assert recorder.replayed == engine.statistics.decode_steps == sum(bursts)
    assert len(bursts) > engine.statistics.host_reads


@pytest.mark.parametrize("rows", [6, 8])
def test_later_turns_go_on_from_what_late_rows_left(either: PolicyModel, rows: int) -> None:
    """Rows that have ended are fed until they are found, and must not write over what a next turn goes on from."""
    first = [request([3 + (i + n) % 20 for i in range(20)], 4, n, max_new_tokens=14 + n) for n in range(2)]
    first = [replace(wanted, hints=Hints(goes_on=True)) for wanted in first]
    options = {"max_batch_size": rows, "block_size": 4}
    plain, _ = three_turns(either, rollout_engine(either, prefix_reuse=False, **options), first)
    waiting, reused = three_turns(either, rollout_engine(either, decode_steps_per_sync=6, **options), first)
    engine = rollout_engine(either, **options, **LATE)
    bursts = bursts_of(engine)
    turns, reused_late = three_turns(either, engine, first)
    assert [turn.token_ids for turn in turns] == [turn.token_ids for turn in waiting]
    assert [turn.token_ids for turn in turns] == [turn.token_ids for turn in plain]
    assert largest_gap([turns], [plain]) < 1e-5
    assert (reused_late == reused > 0) or rows < 8
    assert len(bursts) > engine.statistics.host_reads


def three_turns(policy: PolicyModel, engine: RolloutEngine, first: list[Request]) -> tuple[list[Completion], int]:
    """Every sample hears three tokens and speaks again, as soon as its group is done; the last turns."""
    last: dict[int, Completion] = {}
    with rollout_mode(policy):
        engine.begin(1, 0)
        for wanted in first:
            engine.submit(wanted)
        while engine.has_unfinished:
            for done, said in engine.step():
                if done.place.turn == 2:
                    last[done.index] = said[0]
                    continue
                for sample, completion in enumerate(said):
                    ids = (*done.prompt_ids, *completion.token_ids, 6, 11, 8)[:40]
                    index = done.index if done.place.turn else 100 * (done.index + 1) + sample
                    place = Place(sample, turn=done.place.turn + 1)
                    sampling = replace(done.sampling, max_new_tokens=8)
                    later = replace(done, prompt_ids=ids, num_samples=1, index=index, place=place, sampling=sampling)
                    engine.submit(later)
    return [last[index] for index in sorted(last)], engine.statistics.reused_tokens


@pytest.mark.parametrize("with_graphs", [False, True])
def test_recurrent_states_stand_where_their_rows_ended(one_rank: object, with_graphs: bool) -> None:
    policy = tiny_policy(tiny_config(**DELTA))
    randomise_vectors(policy)
    first = [request([3 + (i + n) % 20 for i in range(18)], 4, n, max_new_tokens=14 + n) for n in range(2)]
    first = [replace(wanted, hints=Hints(goes_on=True)) for wanted in first]
    plain, _ = three_turns(policy, rollout_engine(policy, prefix_reuse=False), first)
    engine = rollout_engine(policy, **LATE)
    if with_graphs:
        taped(engine, policy)
    bursts = bursts_of(engine)
    turns, reused = three_turns(policy, engine, first)
    assert [turn.token_ids for turn in turns] == [turn.token_ids for turn in plain]
    assert largest_gap([turns], [plain]) < 1e-5
    assert reused > 0
    assert len(bursts) > engine.statistics.host_reads


# -- interruptions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_an_interruption_knows_every_token(either: PolicyModel, steps: int) -> None:
    wanted = many()
    plain = generate(either, rollout_engine(either, max_batch_size=20), wanted)
    engine = rollout_engine(either, max_batch_size=20, **LATE)
    found: dict[int, tuple[Completion, ...]] = {}
    with rollout_mode(either):
        engine.begin(1, 0)
        for one in wanted:
            engine.submit(one)
        for _ in range(steps):
            found |= {done.index: completions for done, completions in engine.step()}
        put_aside = engine.interrupt()
        counted = engine.statistics
        for asked in put_aside:
            for sample, whole in zip(asked.so_far, plain[asked.index], strict=True):
                assert sample.token_ids == whole.token_ids[: len(sample.token_ids)]
                assert sample.finish_reason == (whole.finish_reason if sample.token_ids == whole.token_ids else None)
        drawn = [c for group in found.values() for c in group] + [c for asked in put_aside for c in asked.so_far]
        assert counted.generated_tokens == sum(len(c.token_ids) for c in drawn)
        engine.begin(1, 1)
        left = [asked for asked in put_aside if not asked.is_generated]
        for asked in left:
            engine.submit(asked)
        found |= {r.index: r.so_far for r in put_aside if r.is_generated}
        found |= zip([asked.index for asked in left], drain(engine, left), strict=True)
    assert tokens([found[one.index] for one in wanted]) == tokens(plain)


def test_a_group_that_an_interruption_finds_complete_comes_back_with_it(policy: PolicyModel) -> None:
    """Its rows end in the step behind the read: nobody knows it when the engine is stopped."""
    wanted = [request(PROMPT, 1, index, max_new_tokens=40 if index else 12) for index in range(6)]
    engine = rollout_engine(policy, stop_ids=(), **LATE)
    with rollout_mode(policy):
        engine.begin(1, 0)
        for one in wanted:
            engine.submit(one)
        assert engine.step() == engine.step() == []
        put_aside = {asked.index: asked for asked in engine.interrupt()}
    assert put_aside[0].is_generated
    assert [len(put_aside[index].so_far[0].token_ids) for index in range(6)] == [12, *[13] * 5]
    assert [index for index, asked in put_aside.items() if asked.is_generated] == [0]


# -- how many steps are not awaited ------------------------------------------------------------------


def steps_taken(
    policy: PolicyModel, wanted: list[Request], stop_ids: Sequence[int] = (), **options: object
) -> list[int]:
    engine = rollout_engine(policy, stop_ids=stop_ids, **LATE | options)
    bursts = bursts_of(engine)
    generate(policy, engine, wanted)
    return bursts


def test_a_burst_in_which_all_rows_end_is_awaited(policy: PolicyModel) -> None:
    """No burst is run only to find that all rows have ended."""
    assert steps_taken(policy, [request(PROMPT, 8, max_new_tokens=13)]) == [4, 2, 6]
    assert steps_taken(policy, [request(PROMPT, 8, max_new_tokens=12)]) == [4, 2, 5]


def test_rows_known_to_be_full_take_no_further_step(policy: PolicyModel) -> None:
    """Five are full in the steps that are not awaited, and the sixth, which might have gone on, ends before these."""
    wanted = [request(PROMPT, 1, index, max_new_tokens=40 if index == 5 else 6) for index in range(6)]
    free = tokens(generate(policy, rollout_engine(policy, stop_ids=()), wanted))
    end = next(id for id in free[5][1:5] if not any(id in ids for ids in free[:5]))
    assert steps_taken(policy, wanted, stop_ids=(end,)) == [4, 2]
    found = generate(policy, rollout_engine(policy, stop_ids=(end,), **LATE), wanted)
    assert tokens(found) == [*free[:5], free[5][: free[5].index(end) + 1]]


def test_the_last_rows_of_a_rollout_are_awaited(policy: PolicyModel) -> None:
    wanted = [request(PROMPT, 1, index, max_new_tokens=9 if index < 4 else 25) for index in range(4 + FEWEST_ROWS)]
    assert steps_taken(policy, wanted) == [4, 2, 4, 2, 3, 3, 3, 3]  # a CPU reads sooner when rows have ended
    assert steps_taken(policy, wanted[4:]) == [6, 6, 6, 6]


def test_waiting_prompts_are_no_tail(policy: PolicyModel) -> None:
    wanted = [request(PROMPT, 4, max_new_tokens=25)]
    assert steps_taken(policy, [*wanted, replace(wanted[0], index=1)], max_batch_size=4)[:2] == [4, 2]


WATCHED = {
    "stop string": {"sampling": {"stop": ("ab",)}},
    "stop token": {"sampling": {"stop_token_ids": (7,)}},
    "bias": {"sampling": {"constraints": Constraints(logit_bias=((5, 1.0),))}},
    "streams": {"hints": {"streams": True}},
    "scores": {"hints": {"top_logprobs": 2}},
}


@pytest.mark.parametrize("kind", WATCHED)
def test_whoever_is_watched_is_awaited(policy: PolicyModel, kind: str) -> None:
    plain, changed = request(PROMPT, 6, 0, max_new_tokens=25), request(PROMPT[:2], 1, 1, max_new_tokens=25)
    changed = replace(
        changed,
        sampling=replace(changed.sampling, **WATCHED[kind].get("sampling", {})),
        hints=replace(changed.hints, **WATCHED[kind].get("hints", {})),
    )
    engine = rollout_engine(policy, stop_ids=(), **LATE)
    bursts = bursts_of(engine)
    generate(policy, engine, [plain, changed])
    assert len(bursts) <= engine.statistics.host_reads
    assert steps_taken(policy, [plain])[:2] == [4, 2]


def test_overcommitted_blocks_are_awaited(paged: PolicyModel) -> None:
    wanted = [request(PROMPT, 8, max_new_tokens=25)]
    assert steps_taken(paged, wanted, block_size=4) == [4, 2, 4, 2, 4, 2, 6]
    assert set(steps_taken(paged, wanted, block_size=4, kv_overcommit=2.0)) == {6}


def test_ranks_and_stages_that_step_together_await_every_step(
    policy: PolicyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [request(PROMPT, 8, max_new_tokens=25)]
    lane = RolloutEngine(policy, EngineOptions(8, 48, **LATE), (), letters, messages=OneStage())
    bursts = bursts_of(lane)
    generate(policy, lane, wanted)
    assert bursts == [6, 6, 6, 6]
    monkeypatch.setattr(ParallelGroups, "shares_experts", True)
    assert steps_taken(policy, wanted) == [6, 6, 6, 6]


def test_recorded_experts_are_awaited(one_rank: ParallelGroups) -> None:
    config = tiny_config(num_experts=4, moe_router_topk=2, add_qkv_bias=False)
    wanted = [request(PROMPT, 8, max_new_tokens=25)]
    assert steps_taken(tiny_policy(config), wanted) == [4, 2, 4, 2, 4, 2, 6]
    assert steps_taken(tiny_policy(config), wanted, records_routing=True) == [6, 6, 6, 6]


def test_a_call_that_is_cancelled_behind_a_read(either: PolicyModel) -> None:
    wanted = [replace(one, num_samples=1, place=Place(call=one.index)) for one in many()]
    plain = generate(either, rollout_engine(either, max_batch_size=20), wanted)
    engine, found = rollout_engine(either, max_batch_size=20, **LATE), {}
    with rollout_mode(either):
        engine.begin(1, 0)
        for one in wanted:
            engine.submit(one)
        found |= {done.index: completions for done, completions in engine.step()}
        engine.cancel([5, 7])
        while engine.has_unfinished:
            found |= {done.index: completions for done, completions in engine.step()}
    kept = [one.index for one in wanted if one.index not in (5, 7)]
    assert sorted(found) == kept
    assert tokens([found[index] for index in kept]) == tokens([plain[index] for index in kept])


def test_a_cpu_waits_for_every_step_unless_told(policy: PolicyModel) -> None:
    engine = rollout_engine(policy, stop_ids=())
    bursts = bursts_of(engine)
    generate(policy, engine, [request(PROMPT, 8, max_new_tokens=33)])
    assert bursts == [8, 8, 8, 8]


def test_nothing_is_shown_that_may_not_have_been_drawn(policy: PolicyModel) -> None:
    engine = rollout_engine(policy, stop_ids=(), **LATE)
    with rollout_mode(policy):
        engine.begin(1, 0)
        engine.submit(request(PROMPT, 8, max_new_tokens=25))
        engine.step()
        assert engine.unfinished_tokens(lambda _: True) == []
