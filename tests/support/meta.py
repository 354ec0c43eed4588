"""A decode step on the meta device, where nothing has values: for what is launched, and where its tensors lie."""

from __future__ import annotations

import copy
import dataclasses

import torch

from megatron_rl.attention import choose
from megatron_rl.attention.backend import DeviceFacts
from megatron_rl.inference.context import RolloutContext
from megatron_rl.inference.decode import DecodeBurst, Drawer
from megatron_rl.inference.kv_cache import CacheShape
from megatron_rl.inference.paged_cache import PagedCache
from megatron_rl.inference.slot_cache import SlotCache
from megatron_rl.inference.slot_state import SlotState
from megatron_rl.models import PolicyModel, RolloutForward, RolloutOps
from megatron_rl.registry import BACKENDS
from tests.support.tiny import VOCABULARY

META = torch.device("meta")


def meta_context(
    policy: PolicyModel, backend: str, ops: RolloutOps, stored: torch.dtype | None = None
) -> RolloutContext:
    """For 6 slots of 48 tokens; takes the model's values. ``stored``: what the cache holds, if not the model's."""
    gpt = policy.gpt.to(META).eval()
    rope = copy.copy(policy.rope)
    rope.cos, rope.sin = rope.cos.to(META), rope.sin.to(META)
    shape = CacheShape.of(gpt, 48, stored or policy.dtype)
    cache_kernel = BACKENDS.get(backend).cache
    attention = dataclasses.replace(choose("sdpa", DeviceFacts("cpu")), cache=cache_kernel, cache_name=backend)
    paged = cache_kernel.layout == "pages"
    cache = (
        PagedCache(shape, 6, 16, policy.dtype, META, stored) if paged
        else SlotCache(shape, 6, policy.dtype, META, stored)
    )  # fmt: skip
    return RolloutContext(cache, attention, rope, 1, policy.dtype, ops)


def meta_step(policy: PolicyModel, backend: str) -> tuple[DecodeBurst, SlotState]:
    """A decode step in eager torch; takes the model's values."""
    context = meta_context(policy, backend, RolloutOps())
    state = SlotState(6, 48, VOCABULARY, META)
    is_stop = torch.zeros(VOCABULARY, dtype=torch.bool, device=META)
    return DecodeBurst(context, state, RolloutForward(policy, context), Drawer(state, is_stop, None)), state
