"""Who has the device's memory in which phase, from flags, an estimate and what is free.

    model, optimizer and quantised copies are built ─► how large a KV cache ─► the engine
    every rollout: optimizer state off (if asked), cache in ─► generate ─► cache out (if it must), state back
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from megatron_rl.config import RLConfig
from megatron_rl.estimate import estimate, slot_bytes
from megatron_rl.inference.memory import CachePlan, CacheResidency, Room, plan_cache
from megatron_rl.parallel import ParallelGroups
from megatron_rl.parallel.collectives import any_rank, max_over
from megatron_rl.platform.memory import DeviceMemory
from megatron_rl.trainer import Optimization
from megatron_rl.trainer.offload import OptimizerOffload, gradient_storages, state_storages

logger = logging.getLogger(__name__)


class PhaseMemory:
    """Sizes the KV cache, and hands the memory over between rollouts and training."""

    def __init__(self, config: RLConfig, optimization: Optimization, groups: ParallelGroups) -> None:
        """Everything that stays on the device must be there by now; the cache must not."""
        self._config = config
        self._optimization = optimization
        self._groups = groups
        self._device = DeviceMemory(optimization.policy.device)
        self._estimate = estimate(config, groups.world_size, optimization.policy.vocab_size)
        offloads = config.rollout.rl_offload_optimizer_during_inference
        self._offload = OptimizerOffload(optimization) if offloads else None
        held = sum(storage.nbytes() for storage in state_storages(optimization))
        gradients = sum(storage.nbytes() for storage in gradient_storages(optimization))
        self._given_back = held + gradients if offloads else 0
        self._state_to_come = max(0, self._estimate.optimizer - held)
        self._cache = CacheResidency([], self._device, 0)

    @property
    def _training_need(self) -> int:
        """What an update takes beyond what is allocated now."""
        return self._state_to_come + self._estimate.activations + self._estimate.training_logits

    def cache_budget_gb(self) -> float | None:
        """The engine's KV cache in GiB; None: what its largest batch needs. Collective over the job.

        Raises:
            EngineError: on every rank; one of them has no room for a single sequence.
        """
        asked = self._config.rollout.inference_dynamic_batching_buffer_size_gb
        plan = self._plan(None if asked is None else int(asked * 2**30))
        logger.log(logging.WARNING if plan.is_short else logging.INFO, "%s", plan.text)
        return plan.size / 2**30 if plan.is_short else asked

    def _plan(self, asked: int | None) -> CachePlan:
        """All ranks plan with the numbers of the worst: their schedulers must agree."""
        leaves = self._offload is not None
        worst = max_over(
            {
                "not free": -self._device.free(),
                "in rollouts": self._estimate.rollout_logits + (-self._given_back if leaves else self._state_to_come),
                "in training": self._training_need,
            },
            dist.group.WORLD,
        )
        room = Room(-int(worst["not free"]), int(worst["in rollouts"]), int(worst["in training"]))
        return plan_cache(slot_bytes(self._config), self._config.rollout.inference_max_batch_size, asked, room)

    def hold(self, cache: Sequence[torch.Tensor], on_release: Callable[[], None]) -> CacheResidency:
        """Look after the tensors of a cache, and tell when they go; collective over the model-parallel ranks.

        A resumed run without a rollout before its first update would find the cache in the way, so it goes now
        if it must.
        """
        # Between the phases the state is not home yet: an update takes its room too.
        need = self._training_need + self._given_back
        optimization = self._optimization
        self._cache = CacheResidency(
            cache, self._device, need, self._some_rank_must, updates=lambda: optimization.updates_begun
        )
        self._cache.on_release.append(on_release)
        self._cache.after_rollout()
        return self._cache

    @contextlib.contextmanager
    def for_rollouts(self) -> Iterator[None]:
        """Inside, the KV cache is in place and the optimizer's state is away if it was asked to be."""
        with self._offload.away() if self._offload is not None else contextlib.nullcontext():
            with self._cache.resident():
                yield

    def _some_rank_must(self, release: bool) -> bool:
        return any_rank(release, self._groups.model_group)
