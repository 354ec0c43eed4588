"""Our engine: independent draws, shared prefill, stop strings, what it computes and what it counts."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest

from megatron_rl.arithmetic import FEWEST_ROWS
from megatron_rl.models.gpt import PolicyModel, rollout_mode
from megatron_rl.types import Completion, Hints, Place
from tests.support.generation import (
    END,
    generate,
    largest_gap,
    letters,
    ragged_requests,
    request,
    rollout_engine,
    tokens,
)
from tests.support.tiny import DELTA_EXPERTS, tiny_config, tiny_policy

PROMPT = (4, 9, 17, 2)


# -- draws depend on the sample alone ----------------------------------------------------------


def test_batch_size_and_reading_interval_change_no_token(policy: PolicyModel) -> None:
    wanted = ragged_requests(9, num_samples=4, max_new_tokens=20)
    reference = generate(policy, rollout_engine(policy, max_batch_size=36), wanted)
    for options in (
        {"max_batch_size": 1},
        {"max_batch_size": 5},
        {"max_batch_size": 36, "decode_steps_per_sync": 1},
        {"max_batch_size": 16, "decode_steps_per_sync": 50},
        {"max_batch_size": 16, "prefill_token_budget": 1},
    ):
        groups = generate(policy, rollout_engine(policy, **options), wanted)
        assert tokens(groups) == tokens(reference), options
        assert largest_gap(groups, reference) < 1e-5, options


def test_neither_neighbours_nor_order_change_a_token(policy: PolicyModel) -> None:
    wanted = ragged_requests(6, num_samples=3, max_new_tokens=16)
    engine = rollout_engine(policy)
    together = generate(policy, engine, wanted)
    assert tokens(generate(policy, engine, wanted[::-1])[::-1]) == tokens(together)
    for index, alone in enumerate(wanted):
        assert tokens(generate(policy, engine, [alone])) == tokens([together[index]])


def test_a_larger_group_begins_with_the_smaller_one(policy: PolicyModel) -> None:
    """Completions are ordered by sample index, whichever finished first."""
    engine = rollout_engine(policy, max_batch_size=3)
    (few,) = generate(policy, engine, [request(PROMPT, 2, max_new_tokens=16)])
    (many,) = generate(policy, engine, [request(PROMPT, 7, max_new_tokens=16)])
    assert tokens([many])[:2] == tokens([few])
    assert len({len(ids) for ids in tokens([many])}) > 1, "all end together; the order is not tested"


def test_a_task_drawn_again_is_sampled_anew(policy: PolicyModel) -> None:
    first = request(PROMPT, 4, max_new_tokens=12)
    again = replace(first, source=replace(first.source, epoch=1))
    engine = rollout_engine(policy)
    assert tokens(generate(policy, engine, [first])) != tokens(generate(policy, engine, [again]))


def test_calls_of_one_sample_draw_independent_numbers(policy: PolicyModel) -> None:
    """At temperature 50 a token tells the number that drew it. With other prompts the numbers were the same."""
    prompts = [(4, 9, 17, 2), (5, 9, 17, 2), (4, 9, 17, 2), (7,)]
    places = [Place(3, call=0), Place(3, turn=1, call=1), Place(3, call=2, branch=1), Place(3, call=3)]
    source = replace(request(PROMPT).source, prompt_ids=PROMPT)
    calls = [
        replace(request(prompt, index=n, max_new_tokens=40, temperature=50.0), source=source, place=place)
        for n, (prompt, place) in enumerate(zip(prompts, places, strict=True))
    ]
    engine = rollout_engine(policy, stop_ids=())
    drawn = [generate(policy, engine, calls, seed=seed) for seed in range(12)]
    # By position in the sequence, which is what the numbers go by; the last prompt has one token.
    by_call = numpy.array([[letter.token_ids for (letter,) in answers] for answers in drawn])
    rows = [by_call[:, n, :37] if n < 3 else by_call[:, n, 3:] for n in range(4)]
    correlations = numpy.corrcoef([row.ravel() for row in rows])
    assert abs(correlations - numpy.eye(4)).max() < 0.15, correlations
    again = [replace(call, place=replace(call.place, call=10 + call.place.call)) for call in calls[::-1]]
    assert tokens(generate(policy, engine, again, seed=11))[::-1] == tokens(drawn[11]), "asked again in another order"
    alone = generate(policy, engine, [replace(calls[0], place=Place(3))], seed=11)
    assert tokens(alone) == tokens(drawn[11][:1]), "the task's own prompt is drawn for as without a harness"


MIXTURE = {"add_qkv_bias": False, "num_layers": 3, "num_experts": 8, "moe_ffn_hidden_size": 24, "moe_router_topk": 3}


@pytest.mark.parametrize("flags", [MIXTURE, MIXTURE | {"attention_backend": "paged"}, DELTA_EXPERTS])
def test_no_bit_depends_on_what_was_generated_before(one_rank: object, flags: dict[str, object]) -> None:
    """Fewer than `FEWEST_ROWS` sequences: idle rows fill up, and an expert rounds by the number of its rows."""
    policy = tiny_policy(tiny_config(**flags, seq_length=64))
    wanted = ragged_requests(2, max_new_tokens=30)
    before = ragged_requests(9, num_samples=2, max_new_tokens=24, seed=3, temperature=0.7, top_k=9)
    used = rollout_engine(policy, stop_ids=())
    generate(policy, used, before, seed=7)
    assert generate(policy, used, wanted) == generate(policy, rollout_engine(policy, stop_ids=()), wanted)


def test_requests_with_different_sampling_share_a_batch(policy: PolicyModel) -> None:
    settings = [
        {"greedy": True},
        {"temperature": 0.5},
        {"temperature": 1.5},
        {"top_k": 3},
        {"top_p": 0.5},
        {"top_k": 4, "top_p": 0.7, "temperature": 0.8},
    ]
    wanted = [
        request(PROMPT, num_samples=3, index=i, max_new_tokens=10, **sampling) for i, sampling in enumerate(settings)
    ]
    engine = rollout_engine(policy, max_batch_size=32)
    together = generate(policy, engine, wanted)
    for index, alone in enumerate(wanted):
        group = generate(policy, engine, [alone])
        assert tokens(group) == tokens([together[index]])
        assert largest_gap(group, [together[index]]) < 1e-5


def test_top_1_is_greedy_without_doubt(policy: PolicyModel) -> None:
    engine = rollout_engine(policy)
    (greedy,) = generate(policy, engine, [request(PROMPT, greedy=True, max_new_tokens=10)])
    (top_1,) = generate(policy, engine, [request(PROMPT, top_k=1, max_new_tokens=10)])
    assert tokens([top_1]) == tokens([greedy])
    assert set(top_1[0].inference_logprobs) == {0.0}
    assert max(greedy[0].inference_logprobs) < 0


# -- readers along ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("samples", "seen"), [(1, [2, 3, 4, 5, 6]), (8, [2, 10, 18, 24])])
def test_who_reads_along_gets_the_first_token_at_once(policy: PolicyModel, samples: int, seen: list[int]) -> None:
    """Prefill draws one token and the step another; then each step shows one, or eight where rows are many."""
    wanted = request(PROMPT, samples, max_new_tokens=24)
    expected = generate(policy, rollout_engine(policy, stop_ids=()), [wanted])
    engine, shown = rollout_engine(policy, stop_ids=(), decode_steps_per_sync=8), []
    with rollout_mode(policy):
        engine.begin(1, 0)
        engine.submit(replace(wanted, hints=Hints(streams=True)))
        while engine.has_unfinished:
            found = engine.step()
            shown += [len(ids) for _, ids in engine.unfinished_tokens(lambda _: True)][:1] or [24]
    assert shown[: len(seen)] == seen
    assert [each.token_ids for each in found[0][1]] == [each.token_ids for each in expected[0]]


# -- stop strings ------------------------------------------------------------------------------


def stopped_at(policy: PolicyModel, stop: str, k: int) -> Completion:
    """Greedy from `PROMPT` until ``stop``, with no end token, looking every ``k`` steps."""
    engine = rollout_engine(policy, stop_ids=(), decode_steps_per_sync=k)
    ((completion,),) = generate(policy, engine, [request(PROMPT, greedy=True, max_new_tokens=24, stop=(stop,))])
    return completion


@pytest.mark.parametrize("k", [1, 3, 8, 100])
def test_a_stop_string_cuts_behind_the_token_that_completes_it(policy: PolicyModel, k: int) -> None:
    free = [request(PROMPT, greedy=True, max_new_tokens=24)]
    ((whole,),) = generate(policy, rollout_engine(policy, stop_ids=()), free)
    text = letters(whole.token_ids)
    for start in (0, 4, 11):
        stop = text[start : start + 2]
        end = text.index(stop) + 2
        completion = stopped_at(policy, stop, k)
        assert completion.token_ids == whole.token_ids[:end]
        assert completion.inference_logprobs == pytest.approx(whole.inference_logprobs[:end], abs=1e-5)
        assert completion.finish_reason == "stop_string"


def test_a_stop_string_that_never_comes(policy: PolicyModel) -> None:
    completion = stopped_at(policy, "?", k=4)
    assert len(completion.token_ids) == 24
    assert completion.finish_reason == "length"


def test_a_slot_freed_by_a_stop_string_is_used_again(policy: PolicyModel) -> None:
    free = ragged_requests(10, greedy=True, max_new_tokens=20)
    whole = tokens(generate(policy, rollout_engine(policy, stop_ids=()), free))
    answers = [set(letters(ids)) for ids in whole]
    # In about half of them.
    stop = min(sorted(set.union(*answers)), key=lambda letter: abs(sum(letter in a for a in answers) - 5))
    wanted = [replace(r, sampling=replace(r.sampling, stop=tuple(stop))) for r in free]
    engine = rollout_engine(policy, stop_ids=(), max_batch_size=2, decode_steps_per_sync=3)
    groups = generate(policy, engine, wanted)
    for ids, (completion,) in zip(whole, groups, strict=True):
        hits = [place for place, letter in enumerate(letters(ids)) if letter in stop]
        assert completion.token_ids == (ids[: hits[0] + 1] if hits else ids)
        assert completion.finish_reason == ("stop_string" if hits else "length")
    assert {c.finish_reason for group in groups for c in group} == {"stop_string", "length"}


# -- work done ---------------------------------------------------------------------------------


def test_a_prompt_is_prefilled_once_for_its_group(policy: PolicyModel) -> None:
    engine = rollout_engine(policy, max_batch_size=16)
    generate(policy, engine, [request(PROMPT, 6, 0, max_new_tokens=3), request(PROMPT[:3], 5, 1, max_new_tokens=3)])
    assert engine.statistics.prefill_tokens == len(PROMPT) + 3


def test_the_host_reads_once_every_k_steps(policy: PolicyModel) -> None:
    wanted = [request(PROMPT, 8, max_new_tokens=33)]
    for k, reads in ((1, 32), (4, 8), (8, 4), (100, 1)):
        engine = rollout_engine(policy, stop_ids=(), decode_steps_per_sync=k)
        generate(policy, engine, wanted)
        assert engine.statistics.host_reads == reads
        assert engine.statistics.decode_steps == 32
        assert engine.statistics.decode_rows == 8 * 32


def test_finished_rows_are_closed_by_compaction(policy: PolicyModel) -> None:
    """Eight rows, all but one ending early: without compaction all eight would be computed to the end."""
    wanted = [request(PROMPT, 1, i, max_new_tokens=40 if i == 7 else 9) for i in range(8)]
    engine = rollout_engine(policy, stop_ids=(), decode_steps_per_sync=8)
    groups = generate(policy, engine, wanted)
    alone = generate(policy, rollout_engine(policy, stop_ids=()), wanted[7:])
    assert tokens(groups[7:]) == tokens(alone)
    assert largest_gap(groups[7:], alone) < 1e-5
    assert engine.statistics.decode_rows == 8 * 8 + FEWEST_ROWS * 31
    assert engine.statistics.generated_tokens - engine.statistics.completions == 8 * 8 + 31


def test_a_group_comes_back_as_soon_as_it_is_done(policy: PolicyModel) -> None:
    engine = rollout_engine(policy, stop_ids=(), decode_steps_per_sync=4)
    with rollout_mode(policy):
        engine.begin(1, 0)
        engine.submit(request(PROMPT, 2, index=0, max_new_tokens=30))
        engine.submit(request(PROMPT, 2, index=1, max_new_tokens=5))
        assert [done.index for done, _ in engine.step()] == [1]
        assert engine.has_unfinished
        engine.abort()


def test_end_tokens_are_part_of_the_completion(policy: PolicyModel) -> None:
    groups = generate(policy, rollout_engine(policy), ragged_requests(20, num_samples=2, max_new_tokens=24))
    reasons = set()
    for completion in (c for group in groups for c in group):
        reasons.add(completion.finish_reason)
        assert END not in completion.token_ids[:-1]
        assert (completion.token_ids[-1] == END) == (completion.finish_reason == "stop")
    assert reasons == {"stop", "length"}


def test_a_paged_cache_changes_no_token(one_rank: object) -> None:
    slots, pages = (tiny_policy(tiny_config(attention_backend=name)) for name in ("sdpa", "paged"))
    requests = ragged_requests(6, num_samples=3, max_new_tokens=20)
    by_slots = generate(slots, rollout_engine(slots), requests)
    by_pages = generate(pages, rollout_engine(pages, block_size=16), requests)
    assert tokens(by_slots) == tokens(by_pages)
    assert largest_gap(by_slots, by_pages) < 1e-5


@pytest.mark.parametrize("part", ["prefill", "decode"])
def test_a_failed_step_is_not_gone_on_with(policy: PolicyModel, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when memory runs out amid it: the next rollout begins with a step of its own."""
    engine, wanted = rollout_engine(policy), ragged_requests(4, num_samples=2, max_new_tokens=12)
    whole = generate(policy, engine, wanted)

    def fails(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(engine.runner, part, fails)
        generate(policy, engine, wanted)
    assert generate(policy, engine, wanted) == whole
