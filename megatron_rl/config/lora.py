"""LoRA: which matrices are trained as a low-rank change of frozen weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_rl.config.flags import Finding, flag, without_effect
from megatron_rl.errors import shorten
from megatron_rl.families.layout import ModelLayout
from megatron_rl.families.lora import Lora, adapters_of, known_targets

if TYPE_CHECKING:
    from megatron_rl.config.rl_config import RLConfig


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA: train low-rank adapters and freeze the model."""

    lora_rank: int | None = flag(None, ge=1)
    """Train adapters of this rank, e.g. 8, and freeze all other weights. Experts get rank / --moe-router-topk."""
    lora_alpha: float = flag(32.0, gt=0, le=65_536)
    """LoRA alpha: an adapter's output is multiplied by alpha / rank."""
    lora_targets: tuple[str, ...] = flag(("all",))
    """Linear layers that get adapters: all, attention, mlp, experts, or names such as q_proj v_proj linear_fc2."""
    lora_dropout: float = flag(0.0, ge=0, lt=1)
    """Dropout of the adapters' inputs, in SFT only, e.g. 0.05."""
    load_lora: str | None = flag(None, path=True, aliases=("--lora",))
    """Adapters to start from, in PEFT's format: a directory with adapter_config.json, which gives rank, alpha and
    targets."""


def lora_of(config: RLConfig) -> Lora | None:
    """Return the policy's adapters; None where all weights are trained."""
    lora = config.lora
    if lora.lora_rank is None:
        return None
    return Lora(lora.lora_rank, lora.lora_alpha, lora.lora_targets, lora.lora_dropout)


def critic_lora_of(config: RLConfig) -> Lora | None:
    """Return the critic's adapters, which have the policy's alpha and targets; None where it is a whole model."""
    own, rank = lora_of(config), config.critic.rl_critic_lora_rank
    return None if own is None or rank is None else replace(own, rank=rank, dropout=0.0)


def lora_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Report adapters that the model has no place for, and combinations that are not built."""
    lora = lora_of(config)
    if lora is None:
        names = LoraConfig.__dataclass_fields__.keys() - {"load_lora"}  # which has a rank, or cannot be read
        yield from without_effect(config, sorted(names), "adapters; add --lora-rank, or leave it out")
        return
    if lora.dropout and config.training.perform_rl_step:
        yield "lora_dropout", "would train another model than the one that generates; leave it out in RL"
    if config.kernels.transformer_impl != "local":
        yield "lora_rank", "with --transformer-impl transformer_engine is not built; use --transformer-impl local"
    if not config.has_shape:
        return
    layout = ModelLayout.of(config.architecture())  # a rank has not all experts
    known = known_targets(layout)
    if unknown := [name for name in lora.targets if name not in known]:
        yield "lora_targets", f": this model has no {shorten(unknown[0])}; it has {', '.join(known)}"
        return
    for flag_name, own in (("lora_rank", lora), ("rl_critic_lora_rank", critic_lora_of(config))):
        for adapter in () if own is None else adapters_of(layout, own):
            name, most = adapter.narrowest
            if adapter.rank > most:
                yield flag_name, f"is above the width of {name} of {adapter.linear.name}; use at most {most}"
                break
    yield from _adapters_without_a_place(config, lora, layout)


def _adapters_without_a_place(config: RLConfig, lora: Lora, layout: ModelLayout) -> Iterator[Finding]:
    """``layout`` is that of the whole model, which has all targets."""
    adapters, parallel = adapters_of(layout, lora), config.parallel
    for stage in range(config.stages.count):
        if not adapters_of(config.layout(stage=stage), lora):
            yield "lora_targets", f": pipeline stage {stage} has no such linear and would train nothing; name others"
            break
    of_experts = any(adapter.a.is_of_an_expert for adapter in adapters)
    if of_experts and parallel.expert_tensor_parallel_size not in (None, 1, parallel.tensor_model_parallel_size):
        yield "expert_tensor_parallel_size", (
            f"with adapters of experts is not built; use 1 or {parallel.tensor_model_parallel_size}"
        )
    if of_experts and config.model.add_bias_linear:  # gpt-oss: PEFT has no names for matrices in a stack
        yield "lora_targets", "has experts with biases, whose adapters are not built; use --lora-targets attention"
