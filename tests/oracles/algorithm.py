"""Advantages, losses, denominators and corrections from their definitions, one sequence at a time.

Sequences are ``[L]`` tensors over the tokens that the model wrote.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The flags of the same names, and their documented defaults."""

    rl_temperature: float = 1.0
    rl_top_k: int = 0
    rl_top_p: float = 1.0
    rl_max_new_tokens: int = 16
    rl_advantage: str = "grpo"
    rl_keep_zero_variance_groups: bool = False
    rl_policy_loss: str = "clip"
    grpo_clamp_eps_lower: float = 0.2
    grpo_clamp_eps_upper: float = 0.2
    rl_dual_clip: float | None = None
    rl_loss_aggregation: str = "token-mean"
    grpo_kl_beta: float = 0.0
    rl_kl_estimator: str = "k3"
    grpo_entropy_term_weight: float = 0.0
    rl_correction: str = "none"
    rl_correction_cap: float = 2.0
    rl_correction_lower: float | None = None
    rl_correction_upper: float | None = None
    rl_correction_veto: float = 1e-4
    grpo_iterations: int = 1
    optimizer: str = "adam"
    lr: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    sgd_momentum: float = 0.9
    weight_decay: float = 0.01
    clip_grad: float = 1.0


OF_A_LOSS = {
    "gspo": {"grpo_clamp_eps_lower": 3e-4, "grpo_clamp_eps_upper": 4e-4, "rl_loss_aggregation": "sequence-mean"},
    "cispo": {"grpo_clamp_eps_lower": 1.0},
}
"""Documented defaults where a loss has its own."""


def advantages(groups: Sequence[Sequence[float | None]], kind: str) -> list[list[float]]:
    """Of the rewards of every group; None is a failed grade, which takes no part."""
    everything = [reward for group in groups for reward in group if reward is not None]
    return [
        [0.0 if reward is None else _advantage(reward, [r for r in group if r is not None], everything, kind)
         for reward in group]
        for group in groups
    ]  # fmt: skip


def _advantage(reward: float, group: list[float], everything: list[float], kind: str) -> float:
    if kind == "batch_norm":
        return (reward - statistics.fmean(everything)) / (statistics.stdev(everything) + 1e-6)
    if len(group) < 2:
        return 0.0
    centred = reward - statistics.fmean(group)
    if kind == "grpo":
        return centred / (statistics.stdev(group) + 1e-6)
    if kind == "dr_grpo":
        return centred
    if kind == "rloo":
        return reward - (math.fsum(group) - reward) / (len(group) - 1)
    raise KeyError(kind)


@dataclass(frozen=True)
class TokenLoss:
    """Of one sequence: [L] each; the flags say which tokens are clipped."""

    value: Tensor
    clipped: Tensor
    dual_clipped: Tensor


def policy_loss(s: Settings, current: Tensor, old: Tensor, advantage: float) -> TokenLoss:
    """To be minimised, per token."""
    low, high = 1 - s.grpo_clamp_eps_lower, 1 + s.grpo_clamp_eps_upper
    never = torch.zeros(len(current), dtype=torch.bool)
    if s.rl_policy_loss == "cispo":
        ratio = (current.detach() - old).exp()
        return TokenLoss(-ratio.clamp(low, high) * advantage * current, (ratio < low) | (ratio > high), never)
    if s.rl_policy_loss == "clip":
        ratio = (current - old).exp()
    else:  # gspo: the value of the sequence, the gradient of the token
        sequence = (current.detach() - old).mean().exp()
        ratio = sequence * (current - current.detach()).exp()
    plain, held = -ratio * advantage, -ratio.clamp(low, high) * advantage
    value = torch.where(plain > held, plain, held)
    clipped = (ratio > high) if advantage > 0 else (ratio < low) if advantage < 0 else never
    if s.rl_dual_clip is None or advantage >= 0:
        return TokenLoss(value, clipped, never)
    bound = torch.tensor(-s.rl_dual_clip * advantage, dtype=value.dtype)
    return TokenLoss(torch.where(value > bound, bound, value), clipped, ratio > s.rl_dual_clip)


def kl(kind: str, current: Tensor, reference: Tensor) -> Tensor:
    """The estimator of KL(current || reference) at each token."""
    d = current - reference
    return {"k1": d, "k2": d * d / 2, "k3": (-d).exp() - 1 + d}[kind]


def correction(s: Settings, old: Tensor, engine: Tensor) -> tuple[Tensor, Tensor]:
    """Weight of each token, and whether it was capped or rejected; parts joined by ``+`` multiply."""
    ratio = (old - engine).exp()
    weight, touched = torch.ones_like(ratio), torch.zeros_like(ratio, dtype=torch.bool)
    for part in s.rl_correction.split("+"):
        own, changed = _one_correction(s, part, ratio)
        weight, touched = weight * own, touched | changed
    return weight, touched


def _one_correction(s: Settings, kind: str, ratio: Tensor) -> tuple[Tensor, Tensor]:
    none = torch.zeros_like(ratio, dtype=torch.bool)
    if kind == "none":
        return torch.ones_like(ratio), none
    if kind == "token_tis":
        return ratio.clamp(max=s.rl_correction_cap), ratio > s.rl_correction_cap
    if kind == "sequence_tis":
        product = ratio.prod()
        return torch.full_like(ratio, min(float(product), s.rl_correction_cap)), none | (product > s.rl_correction_cap)
    if kind == "veto":
        rejected = none | bool((ratio < s.rl_correction_veto).any())
        return (~rejected).to(ratio), rejected
    low, high = {"masked_is": (0.5, 2.0), "geometric": (0.99, 1.01)}[kind]
    low = low if s.rl_correction_lower is None else s.rl_correction_lower
    high = high if s.rl_correction_upper is None else s.rl_correction_upper
    judged = ratio if kind == "masked_is" else ratio.log().mean().exp() * torch.ones_like(ratio)
    rejected = (judged < low) | (judged > high)
    kept = ratio if kind == "masked_is" else torch.ones_like(ratio)
    return torch.where(rejected, torch.zeros_like(ratio), kept), rejected


def token_weight(s: Settings, length: int) -> float:
    """Of each of a sequence's ``length`` loss tokens."""
    return {"token-mean": 1.0, "sequence-mean": 1 / length, "constant": 1 / s.rl_max_new_tokens}[s.rl_loss_aggregation]


def denominator(s: Settings, lengths: Sequence[int]) -> int:
    """Of an update whose sequences have ``lengths`` loss tokens."""
    return sum(lengths) if s.rl_loss_aggregation == "token-mean" else sum(length > 0 for length in lengths)
