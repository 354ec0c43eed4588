"""A rollout that is interrupted and taken up again: the tokens of one that was not, and whose they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.models.gpt import PolicyModel, rollout_mode
from megatron_rl.types import Completion, Request
from tests.support.generation import generate, letters, ragged_requests, request, rollout_engine, tokens, versions_of
from tests.support.tiny import tiny_config, tiny_policy

# Log-probs are compared within 5e-6: a prefill adds up in another order than decode steps.
PROMPT = (4, 9, 17, 2)
Group = tuple[Completion, ...]


def with_pauses(
    policy: PolicyModel, engine: RolloutEngine, wanted: list[Request], steps: int, version: int = 0
) -> tuple[list[Group], int]:
    """Stopped after ``steps`` steps of the engine, and a step later each time, with one version more; and the last.

    Later, because a prompt in pieces is computed anew after each pause: too early, it would never be complete.
    """
    first = version
    found: dict[int, Group] = {}
    with rollout_mode(policy):
        while wanted:
            engine.begin(1, version)
            for one in wanted:
                engine.submit(one)
            for _ in range(steps + version - first):
                found |= {done.index: group for done, group in engine.step()}
            wanted, version = engine.interrupt(), version + 1
            assert not engine.has_unfinished
            assert not set(found) & {one.index for one in wanted}
    return [found[index] for index in sorted(found)], version


@pytest.fixture(scope="module", params=["slots", "pages"])
def either(request: pytest.FixtureRequest, one_rank: object) -> PolicyModel:
    return tiny_policy(tiny_config(attention_backend="sdpa" if request.param == "slots" else "paged"))


@pytest.mark.parametrize(
    "options",
    [{}, {"max_batch_size": 3}, {"prefill_token_budget": 5}, {"max_batch_size": 40, "decode_steps_per_sync": 3}],
    ids=str,
)
def test_no_token_changes(either: PolicyModel, options: dict[str, int]) -> None:
    wanted = ragged_requests(7, num_samples=3, max_new_tokens=24, temperature=0.8)
    whole = generate(either, rollout_engine(either), wanted)
    groups, pauses = with_pauses(either, rollout_engine(either, **options), wanted, steps=2)
    assert pauses > 2
    assert tokens(groups) == tokens(whole)
    for group, uninterrupted in zip(groups, whole, strict=True):
        for ours, theirs in zip(group, uninterrupted, strict=True):
            assert ours.finish_reason == theirs.finish_reason
            assert ours.inference_logprobs == pytest.approx(theirs.inference_logprobs, abs=5e-6)


def test_a_stop_string_over_a_pause(policy: PolicyModel) -> None:
    free = [request(PROMPT, greedy=True, max_new_tokens=24)]
    ((whole,),) = generate(policy, rollout_engine(policy, stop_ids=()), free)
    text = letters(whole.token_ids)
    wanted = [replace(free[0], sampling=replace(free[0].sampling, stop=(text[7:10],)))]
    engine = rollout_engine(policy, stop_ids=(), decode_steps_per_sync=1)
    ((completion,),), _ = with_pauses(policy, engine, wanted, steps=1)
    end = text.index(text[7:10]) + 3
    assert (completion.token_ids, completion.finish_reason) == (whole.token_ids[:end], "stop_string")
    assert len(set(versions_of(completion)[-3:])) > 1, "the string is of one rollout"


def test_each_token_has_the_version_that_drew_it(policy: PolicyModel) -> None:
    """Three tokens a step and one with the prompt: 4 in the first step, 7 in the next two."""
    engine = rollout_engine(policy, stop_ids=(), decode_steps_per_sync=3)
    wanted = [request(PROMPT, 2, 0, max_new_tokens=14)]
    (group,), pauses = with_pauses(policy, engine, wanted, steps=1, version=5)
    assert pauses - 5 == 3
    for completion in group:
        assert versions_of(completion) == (5,) * 4 + (6,) * 7 + (7,) * 3
        assert completion.older == ((5, 4), (6, 11))
        assert completion.policy_version == 7


def test_weights_that_stayed_the_same_are_one_stretch(policy: PolicyModel) -> None:
    """A step without a signal makes no update, and the version stays."""
    engine = rollout_engine(policy, stop_ids=(), decode_steps_per_sync=3)
    with rollout_mode(policy):
        engine.begin(1, 5)
        engine.submit(request(PROMPT, max_new_tokens=6))
        engine.step()
        (begun,) = engine.interrupt()
        engine.begin(1, 5)
        engine.submit(begun)
        ((_, (completion,)),) = engine.step()
    assert (completion.policy_version, completion.older) == (5, ())
    assert len(completion.token_ids) == 6


def test_what_was_finished_stays_as_it_was(policy: PolicyModel) -> None:
    """Of a group of which some samples are finished, those keep tokens, log-probs and version; so do waiting ones."""
    engine = rollout_engine(policy, max_batch_size=2)
    with rollout_mode(policy):
        engine.begin(1, 3)
        engine.submit(request(PROMPT, 6, max_new_tokens=40))
        while engine.statistics.completions == 0:
            engine.step()
        (begun,) = engine.interrupt()
    kinds = {(sample.finish_reason is not None, bool(sample.token_ids)) for sample in begun.so_far}
    assert kinds == {(True, True), (False, True), (False, False)}
    (group,) = generate(policy, engine, [begun], version=4)
    for before, after in zip(begun.so_far, group, strict=True):
        if before.finish_reason is not None:
            assert after == before
        else:
            assert after.token_ids[: len(before.token_ids)] == before.token_ids
            assert after.inference_logprobs[: len(before.token_ids)] == before.inference_logprobs
            assert set(versions_of(after)) <= {3, 4}


def test_keys_and_values_are_of_the_new_weights(one_rank: object) -> None:
    """Going on with other weights is what they would say after these tokens, not a mixture of two models."""
    first, second = tiny_policy(tiny_config(), seed=1), tiny_policy(tiny_config(), seed=2)
    wanted, engine = request(PROMPT, 3, max_new_tokens=20), rollout_engine(first, stop_ids=(), decode_steps_per_sync=4)
    with rollout_mode(first), torch.no_grad():
        engine.begin(1, 0)
        engine.submit(wanted)
        engine.step()
        (begun,) = engine.interrupt()
        for own, other in zip(first.parameters(), second.parameters(), strict=True):
            own.copy_(other)
    (went_on,) = generate(first, engine, [begun], version=1)
    (anew,) = generate(second, rollout_engine(second, stop_ids=()), [begun], version=1)
    for ours, theirs in zip(went_on, anew, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.inference_logprobs == pytest.approx(theirs.inference_logprobs, abs=5e-6)
        assert ours.older == ((0, 5),)


def test_only_what_is_drawn_now_is_counted(policy: PolicyModel) -> None:
    engine = rollout_engine(policy, stop_ids=(), decode_steps_per_sync=3)
    with rollout_mode(policy):
        engine.begin(1, 0)
        engine.submit(request(PROMPT, 2, max_new_tokens=10))
        engine.step()
        (begun,) = engine.interrupt()
        assert (engine.statistics.generated_tokens, engine.statistics.completions) == (8, 2)
    generate(policy, engine, [begun])
    counted = engine.statistics
    assert (counted.generated_tokens, counted.completions) == (12, 2)
    assert counted.recomputed_tokens == 2 * (len(PROMPT) + 4)
    assert counted.generated_tokens - counted.completions == counted.decode_steps * 2
