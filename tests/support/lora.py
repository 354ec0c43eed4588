"""Adapters that do something, for tests: as drawn they add nothing."""

from __future__ import annotations

import zlib

import torch

from megatron_rl.config.lora import lora_of
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.models.adapters import adapters_in
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.models.lora import adapt
from megatron_rl.models.parameters import part_of
from megatron_rl.platform.groups import ParallelGroups


def adapted(policy: PolicyModel, config: RLConfig, groups: ParallelGroups, size: float = 0.02) -> PolicyModel:
    """The model with the adapters of the flags, every B normal with standard deviation ``size``, on any layout."""
    adapt(policy, config, lora_of(config), groups)
    move_b(policy, groups, size)
    return policy


@torch.no_grad()
def move_b(policy: PolicyModel, groups: ParallelGroups, size: float = 0.02, seed: int = 0) -> None:
    """Draw every B by its name and ``seed``; 0 where a row's matrix has no adapter is the adapter's own matter."""
    for gpt in policy.chunks:
        for adapter in adapters_in(gpt):
            for described, values in adapter.named():
                if described.name.endswith("lora_b"):
                    generator = torch.Generator().manual_seed(zlib.crc32(described.name.encode()) + seed)
                    whole = torch.randn(described.shape, generator=generator) * size
                    values.copy_(part_of(whole, described, groups.part_of(described)))
