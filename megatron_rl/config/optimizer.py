"""The update rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rl.config.fields import flag


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and its constants."""

    optimizer: Literal["adam", "sgd"] = flag("adam")
    """Update rule; adam decouples weight decay."""
    lr: float | None = flag(None, gt=0, le=10, common=True)
    """Peak learning rate."""
    weight_decay: float = flag(0.01, ge=0, le=10)
    """Weight decay."""
    adam_beta1: float = flag(0.9, ge=0, lt=1)
    """Decay of the running mean of gradients."""
    adam_beta2: float = flag(0.999, ge=0, lt=1)
    """Decay of the running mean of squared gradients."""
    adam_eps: float = flag(1e-8, gt=0, le=1)
    """Added to the denominator of an update."""
    sgd_momentum: float = flag(0.9, ge=0, lt=1)
    """Momentum of sgd."""
    clip_grad: float = flag(1.0, ge=0)
    """Largest global gradient norm; 0 leaves gradients alone."""
