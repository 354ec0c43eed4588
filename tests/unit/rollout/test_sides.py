"""The engine amid a rollout with the reference's weights: what they say, and what stays of it for the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.models import PolicyModel, rollout_mode
from megatron_rl.parallel import ParallelGroups
from megatron_rl.rollout.sides import Sides
from megatron_rl.trainer.policy import ReferencePolicy
from megatron_rl.types import Completion, Request
from tests.support.generation import drain, request, rollout_engine
from tests.support.quantized import quantizable_policy, rollout_quantization
from tests.support.samples import all_equal, weights_of

PROMPTS = [tuple((7 * n + 3 * i) % 28 + 4 for i in range(20)) for n in range(4)]
"""Long enough for their beginnings to be taken from the cache."""
FIRST = [replace(request(ids, 2, n, max_new_tokens=8), goes_on=True) for n, ids in enumerate(PROMPTS)]
JUDGES = [replace(one, of_reference=True) for one in FIRST]
LATER = [replace(request((*ids, 5, 6), 2, n, max_new_tokens=8), turn=1) for n, ids in enumerate(PROMPTS)]


def said(engine: RolloutEngine, requests: Sequence[Request]) -> list[tuple[Completion, ...]]:
    """Of an engine without other work."""
    for one in requests:
        engine.submit(one)
    return drain(engine, requests)


def train(policy: PolicyModel) -> None:
    with torch.no_grad():
        for parameter in policy.gpt.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


@pytest.mark.parametrize("recipe", ["none", "int8"])
def test_each_side_says_what_a_model_of_its_weights_says(one_rank: ParallelGroups, recipe: str) -> None:
    """In memory, too: what judges are told changes no bit of the weights and no token of the policy."""
    policy = quantizable_policy()
    copies, engine = rollout_quantization(policy, recipe), rollout_engine(policy, max_batch_size=16)
    alone = []
    with rollout_mode(policy):
        with copies.rollout():
            engine.begin(1, 0)
            alone.append(said(engine, JUDGES))
        reference = ReferencePolicy(policy, copies)
        train(policy)
        copies.weights_changed()
        trained = weights_of(policy)
        with copies.rollout():
            engine.begin(1, 1)
            alone += [said(engine, FIRST), said(engine, LATER)]
            engine.begin(1, 1)
            sides = Sides(engine, reference.generating)
            with sides.inside:
                for one in (JUDGES[0], *FIRST, *JUDGES[1:]):
                    sides.submit(one)
                policy_said = [drain(engine, FIRST)]
                sides.switch()
                for one in LATER:
                    sides.submit(one)
                verdicts = drain(engine, JUDGES)
                sides.switch()
                policy_said.append(drain(engine, LATER))
            assert not sides.held
    assert [verdicts, *policy_said] == [[tuple(replace(c, policy_version=1) for c in g) for g in alone[0]], *alone[1:]]
    assert verdicts != policy_said[0]
    assert all_equal(weights_of(policy), trained)


@pytest.mark.parametrize("recipe", ["none", "int8"])
def test_a_rollout_that_fails_leaves_the_policy(one_rank: ParallelGroups, recipe: str) -> None:
    """And no copies of the reference behind, without making any: another rank may be gone."""
    policy = quantizable_policy()
    copies = rollout_quantization(policy, recipe)
    reference = ReferencePolicy(policy, copies)
    train(policy)
    trained, engine = weights_of(policy), rollout_engine(policy)
    with rollout_mode(policy):
        with pytest.raises(RuntimeError, match="memory"), copies.rollout():
            expected = said(engine, FIRST)
            sides = Sides(engine, reference.generating)
            with sides.inside:
                sides.switch()
                copies.linears.refresh = None
                raise RuntimeError("no memory")
        vars(copies.linears).pop("refresh")
        assert all_equal(weights_of(policy), trained)
        with copies.rollout():
            engine.begin(0, 0)
            assert said(engine, FIRST) == expected
