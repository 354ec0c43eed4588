"""Calls that are cancelled: their rows and blocks are free at the next step, and the others say what they say."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from megatron_rl.inference import rollout_engine as rollout_engine_module
from megatron_rl.inference import staged
from megatron_rl.inference.block_manager import RowBlocks
from megatron_rl.inference.engine import Engine, EngineOptions
from megatron_rl.inference.kv_cache import split_options
from megatron_rl.inference.scheduler import Scheduler
from megatron_rl.inference.sequence import Sequence, SequenceStatus
from megatron_rl.models.gpt import PolicyModel, rollout_mode
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.types import Completion, Hints, Place, Request
from tests.support.generation import letters, ragged_requests, request, rollout_engine
from tests.support.tiny import tiny_config, tiny_policy

PROMPT = (4, 9, 17, 2, 8, 1, 1, 5, 12, 3, 7, 7, 2, 9, 9, 4, 6, 11, 3, 5, 1, 8, 8, 2)


@pytest.fixture(scope="module", params=["slots", "pages"])
def either(request: pytest.FixtureRequest, one_rank: object) -> PolicyModel:
    return tiny_policy(tiny_config(attention_backend="sdpa" if request.param == "slots" else "paged"))


def as_calls(requests: list[Request]) -> list[Request]:
    return [replace(one, place=replace(one.place, call=one.index), hints=Hints(goes_on=True)) for one in requests]


def answers(
    policy: PolicyModel, engine: Engine, wanted: list[Request], cancelled: Collection[int] = (), after: int = 0
) -> dict[int, Completion]:
    """By call; the ``cancelled`` ones are so after as many steps, one with each."""
    found, steps, left = {}, 0, list(cancelled)
    with rollout_mode(policy):
        engine.begin(1, 0)
        for one in wanted:
            engine.submit(one)
        while engine.has_unfinished:
            if steps >= after and left:
                engine.cancel([left.pop(0)])
            found |= {done.place.call: completion for done, (completion,) in engine.step()}
            steps += 1
    return found


@pytest.mark.parametrize(
    ("options", "after"),
    [({}, 1), ({"max_batch_size": 2}, 0), ({"prefill_token_budget": 5, "max_batch_size": 4}, 1), ({}, 3)],
    ids=["running", "waiting", "amid a prompt", "with another begun"],
)
def test_the_others_say_the_same(either: PolicyModel, options: dict[str, int], after: int) -> None:
    """Two of them have the prompt of one that is cancelled, as the choices of one request have."""
    ragged = ragged_requests(5, longest_prompt=24, max_new_tokens=24)
    choices = [request(PROMPT, 1, 5 + n, max_new_tokens=24) for n in range(3)]
    wanted = as_calls([*ragged, *(replace(one, place=Place(branch=n)) for n, one in enumerate(choices))])
    whole = answers(either, rollout_engine(either, stop_ids=()), wanted)
    engine = rollout_engine(either, stop_ids=(), decode_steps_per_sync=2, **options)
    kept = answers(either, engine, wanted, cancelled=(5, 1, 3), after=after)
    assert set(kept) == {0, 2, 4, 6, 7}
    for call, answer in kept.items():
        assert answer.token_ids == whole[call].token_ids
        assert answer.inference_logprobs == pytest.approx(whole[call].inference_logprobs, abs=5e-6)
    assert engine.statistics.completions == 5


def test_every_state_is_cancelled(policy: PolicyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three calls in two rows one runs, of one the prompt is half computed, and one waits."""
    sequences, add = {}, Scheduler.add

    def added(scheduler: Scheduler, one: Sequence) -> None:
        sequences[one.request.place.call] = one
        add(scheduler, one)

    monkeypatch.setattr(Scheduler, "add", added)
    engine = rollout_engine(policy, max_batch_size=2, prefill_token_budget=6, decode_steps_per_sync=1, stop_ids=())
    prompts = PROMPT[:4], PROMPT, PROMPT
    wanted = as_calls([request(prompt, 1, n, max_new_tokens=24) for n, prompt in enumerate(prompts)])
    with rollout_mode(policy):
        engine.begin(1, 0)
        for one in wanted:
            engine.submit(one)
        assert engine.step() == engine.step() == []
        states = [one.status for one in sequences.values()]
        assert states == [SequenceStatus.RUNNING, SequenceStatus.PREFILL, SequenceStatus.WAITING]
        engine.cancel([0, 1, 2, 77])
        assert engine.step() == []
        assert not engine.has_unfinished
        assert not engine.runner.state.alive.any()
        for one in as_calls([request(prompt, 1, n, max_new_tokens=24) for n, prompt in ((3, (7, 1)), (4, (2, 5)))]):
            engine.submit(one)
        engine.step()
        assert sequences[3].status == sequences[4].status == SequenceStatus.RUNNING, "both rows are free"


def test_its_row_and_blocks_are_the_next_one_s(either: PolicyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only row: who waits gets it at once, and not a step more is made."""
    built, build = [], rollout_engine_module.build_cache
    monkeypatch.setattr(rollout_engine_module, "build_cache", lambda *given: built.append(build(*given)) or built[-1])
    engine = rollout_engine(either, stop_ids=(), max_batch_size=1, decode_steps_per_sync=1, block_size=4)
    first, second = as_calls([request(PROMPT, 1, n, max_new_tokens=20) for n in range(2)])
    with rollout_mode(either):
        engine.begin(1, 0)
        engine.submit(first)
        engine.submit(second)
        for _ in range(3):
            assert engine.step() == []
        engine.cancel([0])
        assert [steps_of(engine) for _ in range(19)] == [4, *range(5, 23)]
        assert not engine.has_unfinished
    [(_, blocks, _)] = built
    assert isinstance(blocks, RowBlocks) or blocks.pool.held == 0
    assert engine.statistics.reused_tokens >= 16, "what was computed of its prompt is known"


def test_where_ranks_share_experts(policy: PolicyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here one rank; several, and stages, are in `tests/distributed`."""
    wanted = as_calls([request(PROMPT, 1, n, max_new_tokens=20) for n in range(4)])
    whole = answers(policy, rollout_engine(policy, stop_ids=()), wanted)
    monkeypatch.setattr(ParallelGroups, "shares_experts", True)
    engine = rollout_engine(policy, stop_ids=(), max_batch_size=2, decode_steps_per_sync=2)
    kept = answers(policy, engine, wanted, cancelled=(0, 3), after=2)
    assert {call: answer.token_ids for call, answer in kept.items()} == {n: whole[n].token_ids for n in (1, 2)}
    assert engine.statistics.completions == 2


def test_a_lane_amid_its_step(policy: PolicyModel, one_rank: ParallelGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lanes of one stage, which needs no messages where a burst is one step."""
    monkeypatch.setattr(staged, "split_options", lambda policy, options, _: split_options(policy, options, 2))
    wanted = as_calls(ragged_requests(10, longest_prompt=20, max_new_tokens=20))
    whole = answers(policy, rollout_engine(policy, stop_ids=()), wanted)
    options = EngineOptions(8, 48, decode_steps_per_sync=1, prefill_token_budget=9)
    engine = staged.StagedEngine(policy, options, (), letters, replace(one_rank, ring=(one_rank.pipeline_group,) * 2))
    under_way, cancel = [], engine.cancel
    engine.cancel = lambda calls: (under_way.append([lane.is_paused for lane in engine.lanes]), cancel(calls))
    kept = answers(policy, engine, wanted, cancelled=(0, 3, 7, 8, 1))
    assert {call: answer.token_ids for call, answer in kept.items()} == {n: whole[n].token_ids for n in (2, 4, 5, 6, 9)}
    assert [True, False] in under_way and [False, True] in under_way


def steps_of(engine: Engine) -> int:
    engine.step()
    return engine.statistics.decode_steps


def test_a_cancelled_call_is_forgotten_when_a_rollout_begins(policy: PolicyModel) -> None:
    engine = rollout_engine(policy, stop_ids=())
    engine.cancel([3])
    assert set(answers(policy, engine, as_calls([request(PROMPT, 1, 3, max_new_tokens=5)]))) == {3}
