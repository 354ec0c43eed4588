"""Freeze a model and attach LoRA adapters; and run it without them."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import ConfigError
from megatron_rl.families.lora import Lora, LowRank, adapters_of
from megatron_rl.models import override
from megatron_rl.models.adapters import LinearAdapter, StackAdapter, adapters_in, attach
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.models.parameters import part_of, seed_of
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.quantization.copies import StackedLinear
from megatron_rl.quantization.linears import parallel_linears

logger = logging.getLogger(__name__)


def adapt(policy: PolicyModel, config: RLConfig, lora: Lora, groups: ParallelGroups) -> None:
    """Freeze the model and attach adapters: A is drawn as in PEFT, seeded by its name, B is 0.

    A critic's head stays trainable.

    Raises:
        ConfigError: adapters do not support a target linear; names it.
    """
    heads = {parameter.name for parameter in policy.layout.parameters if parameter.is_value_head}
    for gpt in policy.chunks:
        gpt.requires_grad_(False)
    for name, parameter in policy.named_parameters():
        if name in heads:
            parameter.requires_grad_()
    found = parallel_linears(torch.nn.ModuleList(policy.chunks))
    parts: dict[torch.nn.Module, list[LowRank]] = {}
    for part in adapters_of(policy.layout, lora):
        parts.setdefault(found[part.linear.name], []).append(part)
    for linear, own in parts.items():
        if getattr(linear, "gather_output", False) and own[0].linear.ranks > 1:
            text = f"{own[0].linear.name} gathers its outputs, which adapters do not"
            raise ConfigError([f"--lora-targets: {text}; name other linears"])
        _attach(linear, own, lora, config.training.seed, groups)
    if config.kernels.recompute_granularity is not None:
        # torch skips recomputation if no input needs a gradient, as after a frozen embedding.
        for gpt in policy.chunks:
            if gpt.pre_process:
                gpt.embedding.register_forward_hook(_with_gradient)
    size = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    logger.info("LoRA: %s trainable parameters in %d adapters on this rank; %s frozen", f"{size:,}", len(parts),
                f"{policy.num_parameters - size:,}")  # fmt: skip


def _attach(linear: torch.nn.Module, parts: Sequence[LowRank], lora: Lora, seed: int, groups: ParallelGroups) -> None:
    rows = torch.cat([torch.full((count,), index) for index, count in parts[0].owners])
    owner = part_of(rows, parts[0].b, groups.part_of(parts[0].b))
    kind = StackAdapter if isinstance(linear, StackedLinear) else LinearAdapter
    adapter = kind(linear, parts, owner, lora.dropout)
    with torch.no_grad():
        for described, values in adapter.named():
            if described.name.endswith("lora_a"):
                # A is uniform within 1 / sqrt(inputs), B zero.
                generator = torch.Generator().manual_seed(seed_of(seed, described.name))
                whole = (torch.rand(described.shape, generator=generator) * 2 - 1) / math.sqrt(described.shape[1])
                values.copy_(part_of(whole, described, groups.part_of(described)))
    attach(linear, adapter)


def _with_gradient(_: torch.nn.Module, given: object, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def without_adapters(policy: PolicyModel) -> AbstractContextManager[None]:
    """Run the base model, without adapters, inside the context."""
    return override("is_on", {adapter: False for gpt in policy.chunks for adapter in adapters_in(gpt)})
