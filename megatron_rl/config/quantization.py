"""Quantised rollout weights, and how far rollout and trainer may drift apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rl.config.fields import flag
from megatron_rl.registry import RECIPES


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Number formats of the linear layers in rollouts, and the gate that watches over them."""

    rl_rollout_quantization: str = flag("none", common=True, names_of=RECIPES)
    """Format of the linear layers in rollouts."""
    rl_quantization_skip: tuple[str, ...] = flag(())
    """Linear layers that stay unquantised: patterns such as layers.0.* or *.linear_fc2, first:N, last:N."""
    rl_kv_cache_dtype: Literal["auto", "bf16", "fp8"] = flag("auto")
    """Numbers of the KV cache in rollouts: the model's (auto), bf16, or E4M3 with a scale a layer and KV head."""
    rl_train_forward: Literal["plain", "quantized"] = flag("plain")
    """quantized: the trainer's forward pass uses the rollouts' quantised weights and activations too."""
    rl_evaluate_unquantized: bool = flag(False)
    """Held-out evaluations run the linear layers in full precision; without it in the rollouts' format."""
    rl_mismatch_action: Literal["warn", "stop", "fallback"] = flag("warn")
    """When rollout and trainer disagree too much: warn, stop, or roll out again in the next safer format."""
    rl_mismatch_max_kl: float = flag(0.02, gt=0)
    """Largest k3 estimate of the KL of rollout and trainer, in nats a token."""
    rl_mismatch_max_gap: float = flag(0.15, gt=0)
    """Largest mean difference of rollout and trainer log-probs, in nats a token."""
    rl_mismatch_interval: int = flag(0, ge=0)
    """Steps between two full parity checks; 0 is only before the first update of a launch."""
