"""The KV cache in the layout that the attention backend wants, and the books about it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.attention.product import FEWEST_KEYS
from megatron_rl.errors import EngineError
from megatron_rl.inference.blocks import PagePool
from megatron_rl.inference.kv_cache import Cache, CacheShape
from megatron_rl.inference.options import EngineOptions
from megatron_rl.inference.page_storage import PageStorage
from megatron_rl.inference.paged_cache import PagedCache
from megatron_rl.inference.slot_cache import SlotCache
from megatron_rl.inference.slot_storage import SlotStorage
from megatron_rl.inference.storage import Storage
from megatron_rl.models import PolicyModel


@dataclass(frozen=True)
class CacheLayout:
    """A cache and its books."""

    cache: Cache
    storage: Storage
    num_slots: int

    def publish(self) -> None:
        """Tell the device which pages belong to whom, if that has changed."""
        if isinstance(self.storage, PageStorage) and self.storage.changed:
            self.cache.set_table(self.storage.table)
            self.storage.changed = False


def make_layout(policy: PolicyModel, options: EngineOptions) -> CacheLayout:
    """Sized by the number of sequences, and by the budget if there is one.

    Raises:
        EngineError: the budget does not hold the longest sequence, or the layout cannot do what is asked for.
    """
    # Prefill pads the shortest prompts to FEWEST_KEYS, so the cache must have room for those.
    stored = options.kv_cache_dtype or policy.dtype
    shape = CacheShape.of(policy.gpt, max(options.max_sequence_length, FEWEST_KEYS), stored)
    for problem in policy.attention.page_problems(options.page_length, options.kv_overcommit):
        raise EngineError(problem.text)
    kernel = policy.attention.cache
    if kernel.layout == "slots":
        slots = shape.slots_within(options.cache_budget_gb, options.max_batch_size)
        cache = SlotCache(shape, slots, policy.dtype, policy.device, options.kv_cache_dtype)
        return CacheLayout(cache, SlotStorage(options.reuse_prefixes), slots)
    slots = options.max_batch_size
    page_length = options.page_length or kernel.page_length
    pages = shape.pages_within(options.cache_budget_gb, page_length, slots)
    storage = PageStorage(
        slots, shape.pages_per_sequence(page_length), PagePool(pages, page_length), options.reuse_prefixes,
        options.kv_overcommit,
    )  # fmt: skip
    cache = PagedCache(shape, slots, page_length, policy.dtype, policy.device, options.kv_cache_dtype, pages)
    return CacheLayout(cache, storage, slots)
