"""Who has the device's memory in which phase, from flags, an estimate and what is free.

    model, optimizer and quantised copies are built ─► how large a KV cache ─► the engine
    every rollout: optimizer state off (if asked), cache in ─► generate ─► cache out (if it must), state back
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

import torch.distributed as dist

from megatron_rl.config import RLConfig
from megatron_rl.estimate import estimate, slot_bytes
from megatron_rl.inference import Engine
from megatron_rl.inference.memory import CachePlan, CacheResidency, Room, plan_cache
from megatron_rl.models import PolicyModel, rollout_mode
from megatron_rl.parallel import ParallelGroups
from megatron_rl.parallel.collectives import any_rank, max_over
from megatron_rl.platform.memory import DeviceMemory
from megatron_rl.quantization.rollout import RolloutQuantization
from megatron_rl.trainer import Optimization
from megatron_rl.trainer.offload import OptimizerOffload, gradient_storages, state_storages

logger = logging.getLogger(__name__)


class Phases:
    """Sizes the KV cache, and hands the memory over between rollouts and training."""

    def __init__(
        self,
        config: RLConfig,
        policy: PolicyModel,
        groups: ParallelGroups,
        quantization: RolloutQuantization,
        optimization: Optimization | None = None,
    ) -> None:
        """Everything that stays on the device must be there by now; the cache must not.

        Without ``optimization`` nothing is trained, and the cache never leaves.
        """
        self.quantization = quantization
        self._config = config
        self._policy = policy
        self._wrapped = None if optimization is None else optimization.wrapped
        self._groups = groups
        self._device = DeviceMemory(policy.device)
        self._estimate = estimate(config, groups.world_size, policy.vocab_size)
        self._offload: OptimizerOffload | None = None
        self._given_back = self._state_to_come = self._training_need = 0
        self._updates: Callable[[], int] = lambda: 0
        if optimization is not None:
            self._plan_updates(optimization)
        self._cache = CacheResidency([], self._device, 0)
        self._generate_a_little: Callable[[], None] = _no_engine

    def _plan_updates(self, optimization: Optimization) -> None:
        held = sum(storage.nbytes() for storage in state_storages(optimization))
        gradients = sum(storage.nbytes() for storage in gradient_storages(optimization))
        if self._config.rollout.rl_offload_optimizer_during_inference:
            self._offload = OptimizerOffload(optimization)
            self._given_back = held + gradients
        self._state_to_come = max(0, self._estimate.optimizer - held)
        # Beyond what is allocated now.
        self._training_need = self._state_to_come + self._estimate.activations + self._estimate.training_logits
        self._updates = lambda: optimization.updates_begun

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

    def hold(self, engine: Engine, generate_a_little: Callable[[], None]) -> CacheResidency:
        """Look after the engine's cache, and tell it when that goes; collective over the model-parallel ranks.

        ``generate_a_little`` calibrates a recipe that wants it. A resumed run without a rollout before its first
        update would find the cache in the way, so it goes now if it must.
        """
        # Between the phases the state is not home yet: an update takes its room too.
        need = self._training_need + self._given_back
        self._cache = CacheResidency(
            engine.cache_tensors, self._device, need, self._some_rank_must, updates=self._updates
        )
        self._cache.on_release.append(engine.forget_graphs)
        self._cache.after_rollout()
        self._generate_a_little = generate_a_little
        return self._cache

    @contextlib.contextmanager
    def rollouts(self, quantized: bool = True) -> Iterator[None]:
        """The model generates in here, on quantised weights if there are any and they are wanted.

        The KV cache is in place, and the optimizer's state is away if it was asked to be.
        """
        with rollout_mode(self._policy, self._wrapped):
            with self._offload.away() if self._offload is not None else contextlib.nullcontext():
                with self._cache.resident():
                    numbers = self.quantization
                    with numbers.rollout(self._generate_a_little) if quantized else numbers.plain():
                        yield

    def _some_rank_must(self, release: bool) -> bool:
        return any_rank(release, self._groups.model_group)


def _no_engine() -> None:
    """Nothing generates."""
