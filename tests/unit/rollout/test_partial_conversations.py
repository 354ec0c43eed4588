"""Conversations that wait for the next step: whoever answers first, steps have the same groups, and none is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_rl.inference.engine import Engine
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.trace import divided, extended
from megatron_rl.types import Completion
from tests.support.partial_steps import END, LAG, WANTED, A, B, ReadsLate, Run, X, resume, saved

STEPS = 7


@pytest.fixture
def runs(one_rank: ParallelGroups):
    made: list[Run] = []

    def make(*delays: float, engine: Engine | None = None) -> Run:
        made.append(Run(one_rank, delays, engine=engine))
        return made[-1]

    yield make
    for run in made:
        run.rollouter.close()


def test_no_clock_decides_and_no_prompt_is_lost(runs) -> None:
    at_once, late = runs(0.0), runs(0.004, 0.0, 0.0, 0.002, 0.0)
    trained, drawn, waited = [], 0, 0
    for version in range(STEPS):
        step, other = at_once.step(version), late.step(version)
        assert step.answered == other.answered
        assert step.unfinished == other.unfinished
        trained += [source.task.id for source in step.drawn]
        drawn += step.started
        waited += sum("talks" in record for record in step.unfinished)
        waiting = [record["asked"][1] for record in step.unfinished]
        # Every prompt that was drawn is trained on once, or waits; nothing is in two places.
        assert len(step.drawn) == WANTED
        assert sorted(trained + waiting) == sorted(set(trained + waiting))
        assert len(trained) + len(waiting) == drawn
    assert waited > 3, "no conversation waited behind its first turn"


def test_what_waited_is_said_as_if_it_had_not(runs) -> None:
    """Tokens, replies and rewards; and each token is of the weights of its step."""
    run = runs(0.0)
    rollouts = [rollout for version in range(STEPS) for group in run.step(version).answered.values()
                for rollout in group.rollouts]  # fmt: skip
    mixed = [rollout for rollout in rollouts if rollout.completion.older]
    assert any(rollout.completion.num_turns > 1 for rollout in mixed)
    for rollout in rollouts:
        completion = rollout.completion
        edges = [0, *(edge for span in completion.environment_spans for edge in span), len(completion.token_ids)]
        turns = [completion.token_ids[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
        assert all(turn[-1] == END and set(turn[:-1]) <= {A} for turn in turns)
        assert [completion.token_ids[a:b] for a, b in completion.environment_spans] == [(X,)] * (len(turns) - 1)
        assert rollout.grade.reward == len(turns) - 1 + 0.5 * len(turns)
        assert completion.turn_rewards == (*[0.5] * (len(turns) - 1), len(turns) - 0.5)
        assert completion.finish_reason == "stop"
        versions = [version for version, _ in completion.stretches]
        assert versions == sorted(set(versions))
        assert sum(count for _, count in completion.stretches) == len(completion.token_ids)
        assert versions[-1] - versions[0] <= LAG


def test_a_turn_that_stopping_the_engine_has_completed_is_judged_in_the_next_step(runs) -> None:
    """Which groups wait changes, as they are a token further; what is said in the end does not."""
    plain, late = runs(0.0), runs(0.004, 0.0, engine=ReadsLate())
    said: list[dict[str, object]] = []
    for run in plain, late:
        steps = [run.step(version) for version in range(STEPS)]
        assert sum(len(step.drawn) for step in steps) + len(steps[-1].unfinished) == sum(s.started for s in steps)
        groups = [group for step in steps for group in step.answered.values()]
        said.append({
            group.source.task.id: [
                (r.completion.token_ids, r.completion.environment_spans, r.completion.turn_rewards, r.grade)
                for r in group.rollouts
            ] for group in groups
        })  # fmt: skip
    common = said[0].keys() & said[1].keys()
    assert len(common) > STEPS
    assert {name: said[0][name] for name in common} == {name: said[1][name] for name in common}
    assert late.engine.completed_by_stopping > 0


def test_a_killed_run_goes_on_from_its_checkpoint(runs) -> None:
    whole, first, resumed = runs(0.0), runs(0.0), runs(0.001, 0.0)
    for version in range(3):
        whole.step(version), first.step(version)
    resume(resumed, saved(first))
    assert any("talks" in record for record in first.unfinished.state_dict()["groups"])
    for version in range(3, STEPS):
        assert resumed.step(version).answered == whole.step(version).answered
    assert saved(resumed) == saved(whole)


def test_versions_of_a_turn_that_was_begun_by_hand() -> None:
    """Turn one is of versions 2 and 3, the reply ``X X``, the next turn begun at 3 and gone on with at 5."""
    said = Completion((A, B, END), (-1.0, -2.0, -3.0), "stop", 3, older=((2, 1),))
    begun = Completion((A, A, B), (-4.0, -5.0, -6.0), None, 5, older=((3, 2),))
    whole = extended(said, (X, X), begun)
    assert whole.token_ids == (A, B, END, X, X, A, A, B)
    assert whole.older == ((2, 1), (3, 7))
    assert whole.stretches == ((2, 1), (3, 6), (5, 1))
    before, reply, turn = divided(whole)
    assert (before.token_ids, before.older, before.policy_version) == (said.token_ids, ((2, 1),), 3)
    assert (reply, turn) == ((X, X), begun)
    nothing = replace(begun, token_ids=(), inference_logprobs=(), older=())
    assert extended(said, (X,), nothing).stretches == ((2, 1), (3, 2), (5, 1))
    assert divided(extended(said, (X,), nothing))[2].token_ids == ()
