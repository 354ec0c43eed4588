"""The teacher of an RL run, built from flags."""

from __future__ import annotations

import logging

from megatron_rl.algorithms.extension import Function, advantage_of
from megatron_rl.checkpoint.hf.load import load_hf
from megatron_rl.checkpoint.state import StateRegistry
from megatron_rl.checkpoint.tensors import fingerprints
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.config.rules import teacher_of
from megatron_rl.families import read_model
from megatron_rl.models.gpt import PolicyModel, build_model
from megatron_rl.models.routing import BalanceLosses
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.run.base import Run
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.trainer.teacher import TaughtAdvantage, Teacher

logger = logging.getLogger(__name__)


def build_scorer(
    config: RLConfig, policy: PolicyModel, groups: ParallelGroups, balance: BalanceLosses | None = None
) -> Scorer:
    """Log-probs of the distribution that is sampled; ``balance`` of a model that is trained."""
    return Scorer(policy, groups, config.rollout.rl_temperature, config.kernels.rl_fused_output_layer, balance)


def build_teacher(base: Run, states: StateRegistry) -> Teacher | None:
    """The model of `--rl-teacher-load-hf`, in the policy's layout; collective. A resumed run compares it.

    Raises:
        CheckpointError: its files are damaged, or it is not the teacher that the run began with.
    """
    config, groups = base.config, base.groups
    if not config.wants_teacher:
        return None
    path = config.teacher.rl_teacher_load_hf
    logger.info("teacher: %s", path)
    model = build_model(teacher_of(config, groups.world_size), current_platform(), base.policy.vocab_size)
    load_hf(read_model(path), model, groups)
    for gpt in model.chunks:
        gpt.eval().requires_grad_(False)
    stays = "teacher" in config.rollout.rl_keep_in_rollouts
    teacher = Teacher(model, build_scorer(config, model, groups), path, fingerprints(model, groups), stays)
    base.phases.hold_teacher(teacher.storages)
    return states.register("teacher", teacher, optional=True)


def build_advantage(config: RLConfig) -> Function:
    """That of the rewards, and of the teacher where it is part of the advantage."""
    advantage, teacher = advantage_of(config), config.teacher
    if not config.wants_teacher:
        return advantage
    weight = teacher.rl_teacher_weight if teacher.rl_teacher_as == "advantage" else 0.0
    return TaughtAdvantage(of_rewards=advantage, weight=weight, reward_weight=teacher.rl_reward_weight)
