"""The reference policy borrows the model's storage and gives it back bit for bit."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.packing import collate
from megatron_rl.trainer.policy import ReferencePolicy
from megatron_rl.trainer.scoring import Scorer
from tests.support.samples import all_equal, random_samples, tiny_optimization, weights_of


def disturb(policy: PolicyModel) -> None:
    """Training, as far as the reference is concerned."""
    with torch.no_grad():
        for parameter in policy.gpt.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


@pytest.mark.parametrize("changes", [{}, {"use_distributed_optimizer": True}, {"bf16": True}])
def test_swapping_changes_values_and_keeps_storage(one_rank: ParallelGroups, changes: dict[str, bool]) -> None:
    policy = tiny_optimization(**changes).policy
    start = weights_of(policy)
    reference = ReferencePolicy(policy)
    disturb(policy)
    trained = weights_of(policy)
    addresses = [parameter.data_ptr() for parameter in policy.gpt.parameters()]
    for _ in range(2):
        with reference.swapped_in():
            assert all_equal(weights_of(policy), start)
            assert [parameter.data_ptr() for parameter in policy.gpt.parameters()] == addresses
        assert all_equal(weights_of(policy), trained)
        assert [parameter.data_ptr() for parameter in policy.gpt.parameters()] == addresses
    assert not all_equal(start, trained)


def test_an_exception_also_brings_the_weights_back(one_rank: ParallelGroups) -> None:
    policy = tiny_optimization().policy
    reference = ReferencePolicy(policy)
    disturb(policy)
    trained = weights_of(policy)
    with pytest.raises(RuntimeError, match="out of memory"), reference.swapped_in():
        raise RuntimeError("out of memory")
    assert all_equal(weights_of(policy), trained)


def test_the_reference_is_the_policy_at_the_start(one_rank: ParallelGroups) -> None:
    policy = tiny_optimization().policy
    scorer = Scorer(policy, one_rank, 1.0)
    batch = collate(random_samples(3), "cpu")
    start = scorer.logprobs([batch])[0]
    reference = ReferencePolicy(policy)
    disturb(policy)
    trained = scorer.logprobs([batch])[0]
    with reference.swapped_in():
        assert torch.equal(scorer.logprobs([batch])[0], start)
    assert torch.equal(scorer.logprobs([batch])[0], trained)
    assert not torch.allclose(start, trained)
