"""Memory of the KV cache: how much it may take, and whether it stays while the policy is trained.

before the engine is built ─► plan_cache: bytes, from what is free and what else will be needed
after every rollout ────────► CacheResidency: it stays, or is released until the next one
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron_rl.errors import EngineError
from megatron_rl.platform.memory import DeviceMemory
from megatron_rl.platform.storage import release, storages_of, take_back

logger = logging.getLogger(__name__)

MARGIN = 0.1
"""Share that stays unused: fragments of the allocator, graphs, what an estimate left out."""
BUDGET_FLAG = "--inference-dynamic-batching-buffer-size-gb"


@dataclass(frozen=True)
class Room:
    """What a cache finds, in bytes, on the rank that has the least. Example: 100 free, rollouts take 10: 81 for it."""

    free: int
    """Now, before there is a cache."""
    in_rollouts: int
    """What else a rollout takes of it; negative where it gives something back."""
    in_training: int
    """What an update takes of it."""

    @property
    def for_rollouts(self) -> int:
        """The largest cache that a rollout has room for."""
        return int((self.free - self.in_rollouts) * (1 - MARGIN))

    @property
    def beside_training(self) -> int:
        """The largest cache that can stay during updates."""
        return self.free - int(self.in_training * (1 + MARGIN))


@dataclass(frozen=True)
class CachePlan:
    """The size of the cache, and why."""

    size: int
    """Bytes; the engine makes as many sequences or pages of it as fit."""
    is_short: bool
    """It is less than asked for, or than the largest batch needs, because no more is free."""
    text: str
    """One line for the log."""


def plan_cache(sequence: int, sequences: int, asked: int | None, room: Room) -> CachePlan:
    """The bytes a KV cache may take: what the largest batch needs, at most ``asked``, at most what fits.

    Args:
        sequence: bytes of one sequence of full length.
        sequences: the largest batch.
        asked: the user's budget in bytes; without it the cache is as large as the batch needs.

    Raises:
        EngineError: no sequence fits beside what a rollout needs.
    """
    wanted = sequence * sequences
    limit = wanted if asked is None else min(wanted, asked)
    size = min(limit, room.for_rollouts)
    if size < min(sequence, limit):
        raise EngineError(
            f"no room for the KV cache: one sequence takes {in_words(sequence)}, and of {in_words(room.free)} free "
            f"memory {in_words(room.for_rollouts)} can be used; lower --inference-max-seq-length, or use more "
            "tensor-parallel ranks, --use-distributed-optimizer or --rl-offload-optimizer-during-inference"
        )
    stays = size <= room.beside_training
    limited_by = BUDGET_FLAG if limit < wanted else "the largest batch"
    if size < limit:
        limited_by = f"{in_words(limit)} do not fit"
    text = (
        f"KV cache: {in_words(size)} for {size // sequence} of {sequences} sequences at once "
        f"({limited_by}); {in_words(room.free)} are free, of which an update takes "
        f"{in_words(room.in_training)}: the cache {'stays' if stays else 'is released'} meanwhile"
    )
    return CachePlan(size, size < limit, text)


def in_words(size: int) -> str:
    """Bytes for people."""
    size = max(size, 0)
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.2f} MiB"


class CacheResidency:
    """Keeps the cache during training where there is room for both, and releases it where there is not.

    Tensors stay the same objects, but a cache that was released comes back at other addresses, zeroed:
    captured graphs are stale then, and forgotten.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        memory: DeviceMemory,
        training_need: int,
        agree: Callable[[bool], bool] = lambda flag: flag,
        updates: Callable[[], int] = lambda: 0,
        forget_graphs: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
        tensors: all of the cache; nothing else may lie in their storages.
        training_need: bytes an update takes beyond what is allocated between the phases; an estimate
            that what is measured replaces.
        agree: true on all ranks that make a step together when it is true on one; collective.
        updates: how many there have been; without a new one nothing is measured.
        forget_graphs: of the engine; captured graphs have the addresses of a cache that goes.
        """
        self._storages = [(storage, storage.nbytes()) for storage in storages_of(tensors)]
        self._memory = memory
        self._forget_graphs = forget_graphs
        self._agree = agree
        self._updates = updates
        self._before_training: tuple[int, int, int] | None = None
        self.training_need = training_need
        self.generation = 0
        """How often the cache has come back."""
        self.is_released = False

    @property
    def size(self) -> int:
        """Bytes of the cache while it is there."""
        return sum(size for _, size in self._storages)

    def before_rollout(self) -> None:
        """Take memory again if it was released; collective in nothing."""
        self._measure()
        self._before_training = None
        if not self.is_released:
            return
        for storage, size in self._storages:
            # Zeroed: with what was there a masked cell could give 0 * NaN = NaN.
            take_back(storage, size).zero_()
        self.is_released = False
        self.generation += 1

    def after_rollout(self) -> None:
        """Release the cache unless an update has room beside it; collective over the ranks that ``agree``."""
        if self._storages and not self.is_released:
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
        if not self.is_released:
            self._forget_graphs()
        for storage, _ in self._storages:
            release(storage)
        self.is_released = True

    def _measure(self) -> None:
        """What the training since the last rollout took: exactly if it set the run's peak, else it took less."""
        peak = self._memory.peak()
        if self._before_training is None or peak is None:
            return
        allocated, peak_before, updates = self._before_training
        if self._updates() == updates:  # an evaluation, or the first rollout: the peak says nothing of an update
            return
        taken = peak - allocated
        self.training_need = taken if peak > peak_before else min(self.training_need, taken)
