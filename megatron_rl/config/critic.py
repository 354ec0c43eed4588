"""The critic: a value model beside the policy, of the same shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.config.flags import Finding, flag

if TYPE_CHECKING:
    from megatron_rl.config.rl_config import RLConfig


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The value model of --rl-advantage gae, its optimizer and its loss."""

    rl_critic_lr: float | None = flag(None, gt=0, derived=lambda config, _: config.optimizer.lr)
    """Peak learning rate of the critic; its schedule is the policy's, scaled. Without it --lr."""
    rl_critic_clip_range: float = flag(0.5, gt=0)
    """A value counts as moved by at most this from what it was before the step (PPO's value clipping)."""
    rl_critic_warmup_steps: int = flag(0, ge=0)
    """First steps of the run that train the critic alone."""
    rl_critic_load_hf: str | None = flag(None, path=True)
    """Hugging Face directory or name on the hub, of the policy's architecture and tokenizer, whose trunk the critic
    starts from.

    Without it the policy's as the run begins with it. The value head starts at 0 either way.
    """
    rl_kl_in_reward: bool = flag(False)
    """Take --grpo-kl-beta x (old - reference log-prob) off the reward of each token, in place of the loss term."""


def critic_config(config: RLConfig) -> RLConfig:
    """What the critic's optimizer is built from: the policy's settings, with every learning rate scaled."""
    scale = config.critic.rl_critic_lr / config.optimizer.lr
    schedule = config.schedule
    return config.with_values(
        lr=config.critic.rl_critic_lr, min_lr=scale * schedule.min_lr, lr_warmup_init=scale * schedule.lr_warmup_init
    )


def critic_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Flags that nobody would read, and what a critic is not built for."""
    critic, algorithm, steps = config.critic, config.algorithm, config.total_steps
    if config.training.eval_only:
        return
    if not config.wants_critic:
        for name in (field.name for field in dataclasses.fields(CriticConfig) if field.name in config.typed):
            yield name, "has no effect without a critic; add --rl-advantage gae, or leave it out"
        return
    if steps and critic.rl_critic_warmup_steps >= steps:
        yield "rl_critic_warmup_steps", (
            f"leaves no step of {steps} that trains the policy; use at most {steps - 1}, or a longer run"
        )
    if config.wants_teacher:
        yield "rl_teacher_load_hf", "with a critic is not built; use one of the two"
    if not critic.rl_kl_in_reward:
        return
    if algorithm.grpo_kl_beta == 0:
        yield "rl_kl_in_reward", "has no effect with --grpo-kl-beta 0; give it a weight, or leave this out"
    if "rl_kl_estimator" in config.typed and algorithm.rl_kl_estimator != "k1":
        yield "rl_kl_estimator", (
            "is of the loss term, which --rl-kl-in-reward replaces: the reward takes k1; leave it out"
        )
