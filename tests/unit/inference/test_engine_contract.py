"""What both engines promise."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from megatron_rl.errors import EngineError
from megatron_rl.inference.engine import Engine
from megatron_rl.models.gpt import PolicyModel, rollout_mode
from megatron_rl.types import Completed
from tests.support.generation import (
    drain,
    generate,
    mcore_engine,
    ragged_requests,
    request,
    rollout_engine,
    tokens,
)

MakeEngine = Callable[..., Engine]
PROMPT = (4, 9, 17, 2)


@pytest.fixture(params=[rollout_engine, mcore_engine], ids=["rollout", "mcore"])
def make_engine(request: pytest.FixtureRequest) -> MakeEngine:
    return request.param


def test_a_group_comes_back_whole_and_stamped(policy: PolicyModel, make_engine: MakeEngine) -> None:
    wanted = ragged_requests(5, num_samples=3, max_new_tokens=10)
    groups = generate(policy, make_engine(policy), wanted, version=42)
    for group in groups:
        assert len(group) == 3
        for completion in group:
            assert completion.policy_version == 42
            assert 1 <= len(completion.token_ids) == len(completion.inference_logprobs) <= 10
            assert all(logprob < 0 for logprob in completion.inference_logprobs)


def test_fewer_slots_than_samples_change_no_token(policy: PolicyModel, make_engine: MakeEngine) -> None:
    wanted = ragged_requests(9, num_samples=2, greedy=True, max_new_tokens=20)
    plenty = generate(policy, make_engine(policy, max_batch_size=18), wanted)
    for slots in (1, 3, 7):
        assert tokens(generate(policy, make_engine(policy, max_batch_size=slots), wanted)) == tokens(plenty)


def test_one_new_token(policy: PolicyModel, make_engine: MakeEngine) -> None:
    wanted = ragged_requests(20, num_samples=2, max_new_tokens=1)
    engine = make_engine(policy, stop_ids=())
    groups = generate(policy, engine, wanted)
    assert {len(ids) for ids in tokens(groups)} == {1}
    assert {completion.finish_reason for group in groups for completion in group} == {"length"}
    assert engine.statistics.decode_rows == 0


def test_an_end_token_may_come_first(policy: PolicyModel, make_engine: MakeEngine) -> None:
    wanted = [request(PROMPT, greedy=True, max_new_tokens=8)]
    (first, *rest), = tokens(generate(policy, make_engine(policy, stop_ids=()), wanted))
    assert len(rest) == 7
    ((completion,),) = generate(policy, make_engine(policy, stop_ids=(first,)), wanted)
    assert completion.token_ids == (first,)
    assert completion.finish_reason == "stop"


def test_an_end_token_as_the_last_allowed_one_is_a_stop(policy: PolicyModel, make_engine: MakeEngine) -> None:
    long = [request(PROMPT, greedy=True, max_new_tokens=12)]
    (ids,) = tokens(generate(policy, make_engine(policy, stop_ids=()), long))
    place = next(i for i in range(1, 12) if ids[i] not in ids[:i])
    short = [request(PROMPT, greedy=True, max_new_tokens=place + 1)]
    ((completion,),) = generate(policy, make_engine(policy, stop_ids=(ids[place],)), short)
    assert completion.token_ids == ids[: place + 1]
    assert completion.finish_reason == "stop"


def test_every_request_has_its_own_limit(policy: PolicyModel, make_engine: MakeEngine) -> None:
    wanted = [request(PROMPT[: 1 + i % 4], num_samples=2, index=i, max_new_tokens=1 + i) for i in range(12)]
    groups = generate(policy, make_engine(policy, stop_ids=()), wanted)
    assert [{len(c.token_ids) for c in group} for group in groups] == [{1 + i} for i in range(12)]


def test_greedy_has_no_temperature(policy: PolicyModel, make_engine: MakeEngine) -> None:
    engine = make_engine(policy)
    plain = generate(policy, engine, [request(PROMPT, greedy=True, max_new_tokens=8)])
    assert generate(policy, engine, [request(PROMPT, greedy=True, temperature=2.0, max_new_tokens=8)]) == plain


def test_requests_up_to_the_maximum_length_are_taken(policy: PolicyModel, make_engine: MakeEngine) -> None:
    wanted = [request([5] * length, index=length, max_new_tokens=48 - length) for length in (1, 30, 47)]
    groups = generate(policy, make_engine(policy, stop_ids=()), wanted)
    assert [len(group[0].token_ids) for group in groups] == [47, 18, 1]


@pytest.mark.parametrize(
    ("prompt", "num_samples", "new", "reason"),
    [
        ([5] * 30, 1, 19, "30 prompt tokens and 19 new ones do not fit --inference-max-seq-length 48"),
        ([], 1, 5, "each must be at least 1"),
        ([5], 0, 5, "each must be at least 1"),
        ([5], 1, 0, "each must be at least 1"),
    ],
    ids=["too long", "empty prompt", "no samples", "no tokens"],
)
def test_what_cannot_be_finished_is_refused(
    policy: PolicyModel, make_engine: MakeEngine, prompt: list[int], num_samples: int, new: int, reason: str
) -> None:
    engine = make_engine(policy)
    with pytest.raises(EngineError, match=reason):
        engine.submit(request(prompt, num_samples, max_new_tokens=new))
    assert not engine.has_unfinished


def test_abort_leaves_nothing_behind(policy: PolicyModel, make_engine: MakeEngine) -> None:
    wanted = ragged_requests(6, num_samples=2, seed=3, max_new_tokens=16)
    clean = generate(policy, make_engine(policy), wanted, seed=5)

    engine = make_engine(policy, decode_steps_per_sync=2)
    with rollout_mode(policy):
        engine.begin(1, 0)
        for abandoned in ragged_requests(9, num_samples=3, seed=4, greedy=True, max_new_tokens=30):
            engine.submit(abandoned)
        for _ in range(3):
            engine.step()
        engine.abort()
        assert not engine.has_unfinished
        assert engine.step() == []
    # A single request first: rows beyond it are computed with what the abandoned ones left there.
    (alone,) = generate(policy, make_engine(policy), wanted[:1], seed=5)
    assert generate(policy, engine, wanted[:1], seed=5) == [alone]
    assert generate(policy, engine, wanted, seed=5) == clean


def test_begin_alone_also_abandons_what_was_unfinished(policy: PolicyModel, make_engine: MakeEngine) -> None:
    engine = make_engine(policy)
    engine.submit(request(PROMPT, max_new_tokens=4))
    engine.begin(1, 1)
    assert not engine.has_unfinished


def test_requests_may_arrive_while_others_run(policy: PolicyModel, make_engine: MakeEngine) -> None:
    wanted = ragged_requests(8, num_samples=2, greedy=True, max_new_tokens=12)
    expected = tokens(generate(policy, make_engine(policy), wanted))
    engine = make_engine(policy, decode_steps_per_sync=2)
    early: list[Completed] = []
    with rollout_mode(policy):
        engine.begin(1, 0)
        for late in wanted:
            engine.submit(late)
            early += engine.step()
        finished = {done.index for done, _ in early}
        rest = [late for late in wanted if late.index not in finished]
        completions = dict(zip([r.index for r in rest], drain(engine, rest), strict=True))
    completions |= {done.index: group for done, group in early}
    assert tokens([completions[late.index] for late in wanted]) == expected


def test_the_seed_fixes_every_draw(policy: PolicyModel, make_engine: MakeEngine) -> None:
    wanted = ragged_requests(4, num_samples=3, max_new_tokens=12)
    engine = make_engine(policy)
    first = generate(policy, engine, wanted, seed=1)
    assert generate(policy, engine, wanted, seed=1) == first
    assert generate(policy, make_engine(policy), wanted, seed=1) == first
    assert generate(policy, engine, wanted, seed=2) != first


def test_samples_of_a_group_differ(policy: PolicyModel, make_engine: MakeEngine) -> None:
    (group,) = generate(policy, make_engine(policy, stop_ids=()), [request(PROMPT, 8, max_new_tokens=10)])
    assert len({completion.token_ids for completion in group}) == 8


def test_completions_stand_in_the_order_of_the_samples(policy: PolicyModel, make_engine: MakeEngine) -> None:
    """Eight samples that start together finish in the order of their lengths; they must not come back so."""
    (group,) = generate(policy, make_engine(policy, decode_steps_per_sync=1), [request(PROMPT, 8, max_new_tokens=40)])
    lengths = [len(completion.token_ids) for completion in group]
    assert lengths != sorted(lengths)


def test_other_tasks_get_other_draws(policy: PolicyModel, make_engine: MakeEngine) -> None:
    """Data-parallel ranks share the seed; equal prompts of different tasks must not give equal samples."""
    engine = make_engine(policy)
    (one,) = generate(policy, engine, [request(PROMPT, 4, index=1, max_new_tokens=12)])
    (other,) = generate(policy, engine, [request(PROMPT, 4, index=2, max_new_tokens=12)])
    assert tokens([one]) != tokens([other])


def test_statistics_start_anew(policy: PolicyModel, make_engine: MakeEngine) -> None:
    engine = make_engine(policy, stop_ids=())
    wanted = [request(PROMPT, num_samples=3, index=i, max_new_tokens=5) for i in range(2)]
    for _ in range(2):
        generate(policy, engine, wanted)
        assert engine.statistics.generated_tokens == 30
        assert engine.statistics.completions == 6
        assert engine.statistics.decode_steps == 4
        assert 24 <= engine.statistics.decode_rows <= 4 * 8


def test_steps_inside_a_running_event_loop(policy: PolicyModel, make_engine: MakeEngine) -> None:
    """The rollouter steps the engine from the loop that also waits for grades."""
    wanted = ragged_requests(3, greedy=True, max_new_tokens=6)
    engine = make_engine(policy)

    async def inside() -> list[tuple[int, ...]]:
        return tokens(generate(policy, engine, wanted))

    assert asyncio.run(inside()) == tokens(generate(policy, engine, wanted))
