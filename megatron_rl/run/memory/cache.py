"""Memory of the KV cache: how much it may take, and whether it stays while the policy is trained.

before the engine is built ─► plan_cache: bytes, from what is free and what else will be needed
after every rollout ────────► CacheResidency: it stays, or is released until the next one
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from megatron_rl.errors import EngineError
from megatron_rl.platform.device import DeviceMemory, OffloadableFactory, OffloadableTensors
from megatron_rl.run.memory.estimate import in_words

logger = logging.getLogger(__name__)

MARGIN = 0.1
"""Share that stays unused: fragments of the allocator, graphs, what an estimate left out."""


def plan_cache(
    sequence: int, sequences: int, asked: int | None, free: int, in_rollouts: int, in_training: int,
    share: float | None = None,
) -> tuple[int, bool]:  # fmt: skip
    """Plan the bytes of a KV cache: what the largest batch needs, at most ``asked``, at most what fits; in the log.

    Args:
        sequence: bytes of one sequence of full length.
        sequences: the largest batch.
        asked: the user's budget in bytes; without it the cache is as large as the batch needs.
        free: bytes now, on the rank that has the least, before there is a cache.
        in_rollouts: what else a rollout takes of them; negative where it gives something back.
        in_training: what an update takes of them.
        share: `--rl-rollout-memory-fraction`, the most of what is left beside a rollout; all but ``MARGIN`` without it.

    Returns:
        The bytes, and whether they are less than wanted because no more is free, or may be taken.

    Raises:
        EngineError: no sequence fits beside what a rollout needs.
    """
    wanted = sequence * sequences
    limit = wanted if asked is None else min(wanted, asked)
    fits = int((free - in_rollouts) * (1 - MARGIN if share is None else share))
    size = min(limit, fits)
    if size < min(sequence, limit):
        more = "" if share is None else f"raise --rl-rollout-memory-fraction ({share:g}), "
        raise EngineError(
            f"no room for the KV cache: one sequence takes {in_words(sequence)}, and of {in_words(free)} free "
            f"memory {in_words(fits)} can be used; {more}lower --inference-max-seq-length, or use more "
            "tensor-parallel ranks, --use-distributed-optimizer or --rl-offload-optimizer-during-inference"
        )
    limited_by = "the largest batch" if limit == wanted else "--inference-dynamic-batching-buffer-size-gb"
    if size < limit:
        limited_by = f"{in_words(limit)} do not fit" if share is None else f"--rl-rollout-memory-fraction {share:g}"
    stays = size <= free - int(in_training * (1 + MARGIN))
    logger.log(
        logging.WARNING if size < limit and share is None else logging.INFO,
        "KV cache: %s for %d of %d sequences at once (%s); %s are free, of which an update takes %s: the cache %s "
        "meanwhile", in_words(size), size // sequence, sequences, limited_by, in_words(free), in_words(in_training),
        "stays" if stays else "is released",
    )  # fmt: skip
    return size, size < limit


class CacheResidency:
    """Keeps the cache during training where there is room for both, and releases it where there is not.

    Tensors stay the same objects, and come back zeroed. Captured graphs are forgotten where the addresses change.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], memory: DeviceMemory, training_need: int,
        agree: Callable[[bool], bool] = lambda flag: flag, updates: Callable[[], int] = lambda: 0,
        forget_graphs: Callable[[], None] = lambda: None, offloadable: OffloadableFactory = OffloadableTensors,
    ) -> None:  # fmt: skip
        """Args:
        tensors: all of the cache, with all views; nothing else may lie in their storages.
        training_need: bytes an update takes beyond what is allocated between the phases; an estimate
            that what is measured replaces.
        agree: true on all ranks that make a step together when it is true on one; collective.
        updates: how many there have been; without a new one nothing is measured.
        forget_graphs: of the engine; captured graphs have the addresses of a cache that goes.
        leaving: how they leave.
        """
        self._held = offloadable(tensors)
        self._memory = memory
        self._forget_graphs = forget_graphs
        self._agree = agree
        self._updates = updates
        self._before_training: tuple[int, int, int] | None = None
        self.training_need = training_need
        self.generation = 0
        """How often the cache has come back."""

    @property
    def is_released(self) -> bool:
        """Return whether it has left."""
        return self._held.is_released

    @property
    def size(self) -> int:
        """Bytes of the cache while it is there."""
        return self._held.size

    def before_rollout(self) -> None:
        """Take memory again if it was released, and measure what the training since the last rollout took."""
        peak = self._memory.peak()
        if self._before_training is not None and peak is not None:
            allocated, peak_before, updates = self._before_training
            # Without an update, after an evaluation for example, the peak says nothing of one.
            if self._updates() != updates:  # exactly what it took if it set the run's peak, else at most that
                taken = peak - allocated
                self.training_need = taken if peak > peak_before else min(self.training_need, taken)
        self._before_training = None
        if self.is_released:
            self._held.restore()  # zeroed: with what was there a masked cell could give 0 * NaN = NaN
            self.generation += 1

    def after_rollout(self) -> None:
        """Release the cache unless an update has room beside it; collective over the ranks that ``agree``."""
        if self.size and not self.is_released:
            free, need = self._memory.free(), int(self.training_need * (1 + MARGIN))
            if self._agree(free < need):
                if self.generation == 0:
                    logger.info(
                        "the KV cache (%s) is released while the policy is trained: %s are free beside it, "
                        "an update takes %s", in_words(self.size), in_words(free), in_words(need),
                    )  # fmt: skip
                self.release()
        allocated, peak = self._memory.allocated(), self._memory.peak()
        self._before_training = None if allocated is None or peak is None else (allocated, peak, self._updates())

    def release(self) -> None:
        """Give it up without asking other ranks: after a rollout that failed, what is saved may need the room."""
        if not self.is_released and not self._held.keeps_addresses:
            self._forget_graphs()
        self._held.release()
