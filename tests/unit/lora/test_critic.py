"""A critic that is adapters and a head on the policy's base: whose weights it has, what learns, and an equal twin."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_rl.config.arguments import read_config
from megatron_rl.config.lora import critic_lora_of, lora_of
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.config.training import critic_config
from megatron_rl.models.adapters import adapters_in
from megatron_rl.models.gpt import PolicyModel, build_model
from megatron_rl.models.lora import adapt, without_adapters
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.run.memory.estimate import estimate, report_text
from megatron_rl.run.memory.holdings import Holdings
from megatron_rl.run.weights import copy_trunk, first_critic
from megatron_rl.trainer.critic import ValueScorer
from megatron_rl.trainer.optimizer import Optimization
from megatron_rl.trainer.packing import collate
from tests.support.lora import adapted, move_b
from tests.support.samples import random_samples
from tests.support.tiny import FLAGS, VOCABULARY, tiny_config, tiny_policy

GAE = {"rl_advantage": "gae", "rl_critic_lr": 5e-3, "lora_rank": 4, "rl_critic_lora_rank": 2}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 24}
HEAD = "output_layer.weight"


def ready(critic: Optimization, groups: ParallelGroups) -> Optimization:
    """With a head and adapters that say something: from zeros no gradient goes into the trunk."""
    move_b(critic.policy, groups, seed=1)
    with torch.no_grad():
        for name, parameter in critic.policy.named_parameters():
            if name == HEAD:
                parameter.copy_(torch.linspace(-0.3, 0.4, parameter.numel())[None])
    critic.reload_main_parameters()
    return critic


def train(critic: Optimization, groups: ParallelGroups, updates: int = 3) -> list[torch.Tensor]:
    """Values after each update toward 1, [T]."""
    scorer, batch, found = ValueScorer(critic.policy, groups), collate(random_samples(5), "cpu"), []
    for _ in range(updates):
        scorer.update(critic, [[batch]], lambda output, b: (
            (scorer.after(output, b) - 1).square().sum(), torch.tensor(b.loss_mask.numel()), {},
        ))  # fmt: skip
        found += scorer.all_after([batch])
    return found


def twin(config: RLConfig, policy: PolicyModel, groups: ParallelGroups) -> Optimization:
    """A critic with a copy of the base of its own, frozen and adapted in the same way."""
    critic = build_model(config, current_platform(), policy.vocab_size, "value")
    copy_trunk(policy, critic)
    adapt(critic, config, critic_lora_of(config), groups)
    return Optimization(critic, critic_config(config))


@pytest.mark.parametrize("changes", [{}, EXPERTS, {"bf16": True, "use_distributed_optimizer": True}],
                         ids=["dense", "experts", "bf16"])  # fmt: skip
def test_it_learns_as_one_with_a_base_of_its_own(one_rank: ParallelGroups, changes: dict[str, object]) -> None:
    """And neither the base nor the policy's adapters move, nor does the policy's own update move a value."""
    config = tiny_config(**GAE, **changes)
    policy = adapted(tiny_policy(config), config, one_rank)
    shared, apart = ready(first_critic(config, policy, one_rank), one_rank), twin(config, policy, one_rank)
    ready(apart, one_rank)
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    heads = {name: p.detach().clone() for name, p in shared.policy.named_parameters() if name == HEAD}
    for ours, theirs in zip(train(shared, one_rank), train(apart, one_rank), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    other = dict(apart.policy.named_parameters())
    trained = {name: p for name, p in shared.policy.named_parameters() if ".adapter." in name or name == HEAD}
    for name, values in trained.items():
        torch.testing.assert_close(values, other[name], rtol=0, atol=1e-6)
    assert all(torch.equal(p, before[name]) for name, p in policy.named_parameters())
    assert not torch.equal(trained[HEAD], heads[HEAD])
    learns = [p for p in shared.policy.parameters() if p.requires_grad]
    assert len(learns) == 1 + sum(len(list(a.parameters())) for gpt in shared.policy.chunks for a in adapters_in(gpt))
    with torch.no_grad():
        scorer, batch = ValueScorer(shared.policy, one_rank), collate(random_samples(5), "cpu")
        (values,) = scorer.all_after([batch])
        move_b(policy, one_rank, 0.5, seed=2)
        assert torch.equal(scorer.all_after([batch])[0], values), "the policy's adapters are not the critic's"
        with without_adapters(policy):
            assert torch.equal(scorer.all_after([batch])[0], values)


def test_the_base_is_there_once_and_the_estimate_says_so(one_rank: ParallelGroups) -> None:
    config = tiny_config(**GAE, bf16=True, use_distributed_optimizer=True)
    policy = adapted(tiny_policy(config), config, one_rank)
    critic = first_critic(config, policy, one_rank)
    held = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    own = [p for p in critic.policy.parameters() if p.untyped_storage().data_ptr() not in held]
    assert {id(p) for p in own} == {id(p) for p in critic.policy.parameters() if p.requires_grad}
    buffers = [buffer for chunk in critic.wrapped for buffer in chunk.buffers]
    weights, gradients = (sum(getattr(b, name).nbytes for b in buffers) for name in ("param_data", "grad_data"))
    foreseen = estimate(config, 1, VOCABULARY)
    states = foreseen.critic.update - weights - gradients
    numbers = sum(p.numel() for p in own)
    assert states == 12 * numbers, "fp32 main parameters and two moments"
    assert "adapters and head on the policy's base" in report_text(config, foreseen)
    whole = estimate(tiny_config(**GAE | {"rl_critic_lora_rank": False}), 1, VOCABULARY)
    assert whole.critic.update > 3 * foreseen.critic.update
    state = Holdings(critic, with_weights=True).state
    assert held.isdisjoint({s.data_ptr() for s in state.storages}), "rollouts read the base: it never leaves"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"rl-critic-lora-rank": 4}, "--rl-critic-lora-rank 4 has no effect without a critic"),
        ({"rl-critic-lora-rank": 4, "rl-advantage": "gae"}, "add --lora-rank, or leave this out"),
        ({"rl-critic-lora-rank": 40, "rl-advantage": "gae", "lora-rank": 4}, "is above the width of o_proj"),
    ],
)
def test_where_it_cannot_be(flags: dict[str, object], line: str, tmp_path: Path) -> None:
    argv = [str(w) for name, v in {**FLAGS, **flags}.items() for w in (f"--{name}", v) if w is not None]
    (problem,) = read_config(argv, 1)[1]
    assert line in problem.text


def test_its_alpha_and_targets_are_the_policys() -> None:
    config = tiny_config(**GAE, lora_alpha=8, lora_targets="attention")
    own, critic = lora_of(config), critic_lora_of(config)
    assert (critic.rank, critic.alpha, critic.targets) == (2, 8.0, ("attention",)) and own.rank == 4
