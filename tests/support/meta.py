"""A decode step on the meta device, where nothing has values: for what is launched, and where its tensors lie."""

from __future__ import annotations

import copy
import dataclasses

import torch

from megatron_rl.inference.batch_state import BatchState
from megatron_rl.inference.context import RolloutContext
from megatron_rl.inference.kv_cache import PagedCache, RowCache
from megatron_rl.inference.model_runner import ModelRunner
from megatron_rl.inference.sampler import Sampler
from megatron_rl.models.attention.backend import BACKENDS, DeviceFacts
from megatron_rl.models.attention.selection import choose
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.models.rollout_ops import RolloutOps
from megatron_rl.platform.collectives import OneStage
from tests.support.tiny import VOCABULARY

META = torch.device("meta")


def meta_context(
    policy: PolicyModel, backend: str, ops: RolloutOps, stored: torch.dtype | None = None
) -> RolloutContext:
    """For 6 rows of 48 tokens; takes the model's values. ``stored``: what the cache holds, if not the model's."""
    policy.gpt.to(META).eval()
    rope = copy.copy(policy.ropes["main"])
    rope.cos, rope.sin = rope.cos.to(META), rope.sin.to(META)
    layers = [layer.cache for layer in policy.layout.layers]
    cache_kernel = BACKENDS.get(backend).cache
    attention = dataclasses.replace(choose("sdpa", DeviceFacts("cpu")), cache=cache_kernel, cache_name=backend)
    paged = cache_kernel.layout == "blocks"
    cache = (
        PagedCache(layers, 6, 48, 16, policy.dtype, META, stored) if paged
        else RowCache(layers, 6, 48, policy.dtype, META, stored)
    )  # fmt: skip
    return RolloutContext(dataclasses.replace(policy, attention=attention, ropes={"main": rope}), cache, ops)


def meta_runner(policy: PolicyModel, backend: str) -> ModelRunner:
    """Decode steps in eager torch; takes the model's values."""
    context = meta_context(policy, backend, RolloutOps(fused=False))
    state = BatchState(6, 48, torch.zeros(VOCABULARY, dtype=torch.bool, device=META))
    return ModelRunner(policy, context, state, Sampler(), OneStage())
