"""The trainer on any parallel layout, by global names; run on every rank by `test_layouts.py`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.algorithms.advantages import batch_norm
from megatron_rl.algorithms.extension import advantage_of
from megatron_rl.algorithms.objective import PolicyObjective
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.config.rules import teacher_of
from megatron_rl.metrics.timers import PhaseTimer
from megatron_rl.models.gpt import PolicyModel, rollout_mode
from megatron_rl.models.routing import BalanceLosses
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import ParallelGroups, initialize, shut_down
from megatron_rl.run.rl import build_scorer
from megatron_rl.run.weights import first_critic
from megatron_rl.trainer import optimizer
from megatron_rl.trainer.batches import BatchBuilder
from megatron_rl.trainer.critic import Critic, ValueScorer
from megatron_rl.trainer.optimizer import Optimization
from megatron_rl.trainer.policy import BasePolicy, PolicyTrainer, ReferencePolicy
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.trainer.teacher import DistillationAdvantage, Teacher
from megatron_rl.trainer.update import Updates
from tests.distributed.programs import gather_whole
from tests.support.lora import adapted, move_b
from tests.support.samples import own_reward, random_samples, rewards_of, with_experts, with_prompts
from tests.support.tiny import single_thread, tiny_config, tiny_policy

COUNT = 8


def train(folder: str, parallel: Mapping[str, Any], cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Three updates of each case. What this rank knows of gradients, weights and log-probs goes to ``folder``.

    A case's changes of sizes that need no other process groups may stand under ``parallel``, and under ``samples``
    how many there are, and under ``prompts`` how many they share.
    """
    single_thread()
    # Several buckets, as in a model of a real size, so that overlapping has something to put in order.
    optimizer.DistributedDataParallelConfig = partial(optimizer.DistributedDataParallelConfig, bucket_size=4_000)
    configs = {name: configured(parallel, changes) for name, changes in cases.items()}
    groups = initialize(next(iter(configs.values())).parallel, current_platform())
    metrics = {}
    for name, config in configs.items():
        metrics[name], tensors = one_case(
            config, groups, cases[name].get("samples", COUNT), cases[name].get("prompts", 0)
        )
        torch.save(tensors, Path(folder) / f"{name}.{groups.rank}.pt")
    shut_down()
    return metrics


def configured(parallel: Mapping[str, Any], changes: Mapping[str, Any]) -> RLConfig:
    """`tiny_config` with 4 layers; Adam's epsilon is large, so that it does not blow rounding up to a visible step."""
    flags = {name: value for name, value in changes.items() if name not in ("parallel", "samples", "prompts")}
    usual = {"num_layers": 4, "clip_grad": 0.0, "lr": 1e-3, "adam_eps": 1e-4, "train_iters": 100}
    config = tiny_config(int(os.environ["WORLD_SIZE"]), **(usual | flags))
    sizes = {"expert_tensor_parallel_size": None} | parallel | changes.get("parallel", {})
    return replace(config, parallel=replace(config.parallel, **sizes))


def one_case(
    config: RLConfig, groups: ParallelGroups, count: int, prompts: int
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Metrics of two steps, of one update and of two; and tensors by kind and name."""
    policy, reference = tiny_policy(config), ReferencePolicy
    if config.lora.lora_rank is not None:
        policy, reference = adapted(policy, config, groups), BasePolicy
    optimization, balance = Optimization(policy, config), BalanceLosses.of(config, policy.device)
    scorer = Scorer(policy, groups, 1.0, config.kernels.rl_fused_output_layer, balance)
    teacher, advantage = None, batch_norm.Advantage()  # which needs no pass for old log-probs
    if config.wants_teacher:
        model = tiny_policy(teacher_of(config, dist.get_world_size()), seed=5)
        teacher = Teacher(model, build_scorer(config, model, groups), "", {}, stays=False)
        weight = config.teacher.rl_teacher_weight if config.teacher.rl_teacher_as == "advantage" else 0.0
        advantage = DistillationAdvantage(
            of_rewards=own_reward, weight=weight, reward_weight=config.teacher.rl_reward_weight
        )
    critic = None
    if config.wants_critic:
        critic, advantage = with_critic(config, policy, groups), advantage_of(config)
    trainer = PolicyTrainer(
        optimization, scorer, advantage, PolicyObjective.of(config), 1, PhaseTimer(),
        reference(policy), teacher, critic,
    )  # fmt: skip
    shares = config.training.rl_share_prompts
    builder = BatchBuilder(48, config.sequence_shares, policy.device, groups, config.stages, shares)
    samples = random_samples(count)
    if prompts:
        samples = with_prompts(samples, prompts)
    if config.rollout.rl_router_replay:
        layers = [layer.index for layer in policy.layout.layers]
        samples = with_experts(samples, layers, config.model.num_experts, config.model.moe_router_topk)
    own = samples[groups.rollout_rank :: groups.rollout_size]
    metrics, tensors = [], {}
    for batch_size in (count, -(-count // 2)):
        with rollout_mode(policy, optimization.wrapped):  # as in a run: all parameters of the last update are there
            updates = builder.updates(own, batch_size, seed=1)
        metrics.append(trainer.step(updates, rewards_of(samples)).metrics)
        if "gradients" not in tensors and not config.parallel.use_distributed_optimizer:
            tensors["gradients"] = whole(policy, groups, gradient)
            if critic is not None:
                tensors["critic's gradients"] = whole(critic_model(critic), groups, gradient)
    if critic is not None:
        with rollout_mode(critic_model(critic), critic.optimization.wrapped):
            tensors["critic's weights"] = whole(critic_model(critic), groups, lambda one: one.data)
            tensors["values"] = {
                f"{sample}": row
                for part in critic.with_values(updates)
                for batch in part
                for sample, row in zip(batch.samples.sample_id, batch.values.split(batch.packing.lengths), strict=False)
            }
    tensors |= as_in_decoding(policy, scorer, updates)
    with rollout_mode(policy, optimization.wrapped):
        tensors["weights"] = whole(policy, groups, lambda parameter: parameter.data)
        tensors["logprobs"] = by_sample(scorer, updates)
    return metrics, tensors


def as_in_decoding(policy: PolicyModel, scorer: Scorer, updates: Updates) -> dict[str, dict[str, torch.Tensor]]:
    """Log-probs by absorbed latent attention, of a model that has it."""
    if not policy.layout.architecture.multi_latent_attention:
        return {}
    from megatron_rl.models.blocks.latent import absorbed_attention

    with absorbed_attention(policy.layers):
        return {"logprobs, absorbed": by_sample(scorer, updates)}


def by_sample(scorer: Scorer, updates: Updates) -> dict[str, torch.Tensor]:
    """Log-probs of all tokens of each sample."""
    return {
        f"{sample}": row
        for part in updates
        for batch, rows in zip(part, scorer.logprobs(part), strict=True)
        for sample, row in zip(batch.samples.sample_id, rows.split(batch.packing.lengths), strict=False)
    }


def with_critic(config: RLConfig, policy: PolicyModel, groups: ParallelGroups) -> Critic:
    """As a run has one, but its head says something: from a head of 0 no gradient goes into the trunk."""
    optimization = first_critic(config, policy, groups)
    if config.critic.rl_critic_lora_rank is not None:
        move_b(optimization.policy, groups, seed=1)
    for name, parameter in optimization.policy.named_parameters():
        if name == "output_layer.weight":
            parameter.data.copy_(torch.linspace(-0.3, 0.4, parameter.numel())[None])
    optimization.optimizer.reload_model_params()
    balance = BalanceLosses.of(config, optimization.policy.device, of_critic=True)
    scorer = ValueScorer(optimization.policy, groups, balance)
    return Critic(optimization, scorer, config.critic.rl_critic_clip_range)


def critic_model(critic: Critic) -> PolicyModel:
    """This rank's part."""
    return critic.optimization.policy


def gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Reduced, as the optimizer reads it."""
    return parameter.main_grad


def whole(
    policy: PolicyModel, groups: ParallelGroups, read: Callable[[torch.nn.Parameter], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What this rank's stage has, and its experts, gathered over its tensor-parallel ranks; collective over them."""
    found = {}
    for name, parameter in policy.named_parameters():
        if read is gradient and not hasattr(parameter, "main_grad"):  # frozen
            continue
        values = torch.nn.Parameter(read(parameter).detach().clone())
        for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride"):
            setattr(values, attribute, getattr(parameter, attribute, None))
        group = groups.experts.tensor if ".experts." in name else groups.tensor_group
        found[name] = gather_whole(values, group)
    return found
