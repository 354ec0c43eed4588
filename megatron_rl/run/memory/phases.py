"""Who has the device's memory when. Each phase holds only what it needs.

                      rollouts, evaluation          update                     save
    weights           quantised: those still read   all                        all
    quantised copies  all                           none, if it has no room    -
    KV cache          all                           none, if it has no room    -
    gradients         none                          all                        -
    optimizer state   on the host, if asked         all                        all
    critic            gradients none, the rest on   all                        all
                      the host, if asked
    teacher           none                          while it scores            none

`--rl-keep-in-rollouts weights gradients teacher` leaves those in place. Between the phases everything of the update is
there, without the teacher.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
import torch.distributed as dist

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import MemoryExhausted
from megatron_rl.inference.engine import Engine
from megatron_rl.models.gpt import PolicyModel, rollout_mode
from megatron_rl.platform.collectives import any_rank, gather_json, max_over
from megatron_rl.platform.cuda import strict_algorithms
from megatron_rl.platform.device import DeviceMemory, OutOfMemoryOnAllRanks, device_name, is_out_of_memory, reason_of
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.quantization.rollout import RolloutQuantization
from megatron_rl.run.memory.cache import CacheResidency, plan_cache
from megatron_rl.run.memory.estimate import Estimate, estimate, in_words, slot_bytes
from megatron_rl.run.memory.holdings import Holdings, Weights, size_of
from megatron_rl.trainer.optimizer import Optimization
from megatron_rl.types import Request

logger = logging.getLogger(__name__)


class Phases:
    """Sizes the KV cache, and hands the memory over between rollouts, updates and saves."""

    def __init__(
        self, config: RLConfig, policy: PolicyModel, groups: ParallelGroups, quantization: RolloutQuantization,
    ) -> None:  # fmt: skip
        """Collective over the job: ranks that share a device share its memory."""
        self.quantization = quantization
        self._config = config
        self._policy = policy
        self._groups = groups
        name = device_name(policy.device)
        self._device = DeviceMemory(policy.device, sharers=gather_json(name, dist.group.WORLD).count(name))
        self._estimate = estimate(config, groups.world_size, policy.vocab_size, groups.stage)
        self.training: Training | None = None
        """None where nothing is trained."""
        self._engine: Engine | None = None
        self.cache = CacheResidency([], self._device, 0)
        self._prompts: Callable[[], Sequence[Request]] | None = None

    @property
    def _update_need(self) -> int:
        """What an update takes beyond what is allocated now."""
        if self.training is None:
            return 0
        return self._estimate.passing + self.training.to_come(self._estimate)

    def hold_training(self, optimization: Optimization, critic: Optimization | None = None) -> None:
        """Look after what training needs; without this nothing is trained, and nothing leaves."""
        self.training = Training(self._config, optimization, critic, self.quantization)

    def cache_budget_gb(self) -> float | None:
        """Return the engine's KV cache in GiB; None: what its largest batch needs. Collective over the job.

        Everything that stays on the device must be there by now; the cache must not.

        Raises:
            EngineError: on every rank; one of them has no room for a single sequence.
        """
        flag = self._config.rollout.inference_dynamic_batching_buffer_size_gb
        given_back = state_to_come = 0
        if self.training is not None:
            given_back = self.training.given_back()
            if not self.training.offloads:
                state_to_come = self.training.to_come(self._estimate)
        # All ranks plan with the numbers of the worst: their schedulers must agree.
        worst = max_over(
            {
                "not free": -self._device.free(),
                "in rollouts": self._estimate.rollout_logits.rollout + state_to_come - given_back,
                "in training": self._update_need,
            },
            dist.group.WORLD,
        )
        size, is_local = plan_cache(
            slot_bytes(self._config),
            self._config.rollout.inference_max_batch_size,
            asked=None if flag is None else int(flag * 2**30),
            free=-int(worst["not free"]),
            in_rollouts=int(worst["in rollouts"]),
            in_training=int(worst["in training"]),
            share=self._config.rollout.rl_rollout_memory_fraction,
        )
        return size / 2**30 if is_local else flag

    def hold(self, engine: Engine, prompts: Callable[[], Sequence[Request]]) -> CacheResidency:
        """Look after the engine's cache; collective over the model-parallel ranks.

        ``prompts`` gives what a recipe that calibrates is shown: a few short groups.

        A resumed run without a rollout before its first update would find the cache in the way, so it goes now
        if it must.
        """
        self._engine, self._prompts = engine, prompts
        training = self.training
        self.cache = CacheResidency(
            engine.cache_tensors,
            self._device,
            # After a rollout what has left is not home yet: an update takes its room too.
            self._update_need + (0 if training is None else training.given_back()),
            lambda release: any_rank(release, self._groups.model_group),
            lambda: 0 if training is None else training.optimization.updates_begun,
            engine.forget_graphs,
            self.quantization.offloadable,
        )
        self.cache.after_rollout()
        self._release_copies()
        return self.cache

    @contextlib.contextmanager
    def rollouts(self, quantized: bool = True) -> Iterator[None]:
        """Let the model generate in the block, on quantised weights if there are any and they are wanted.

        Raises:
            MemoryExhausted: it did not fit; says what to lower.
        """
        training = self.training
        wrapped = () if training is None else training.optimization.wrapped
        with out_of_memory_reported(self._config, "rollout"), rollout_mode(self._policy, wrapped):
            try:
                if training is not None:
                    training.leave()
                if quantized and self.quantization.wants_calibration:
                    self._calibrate()
                with self._format(quantized):
                    if training is not None and quantized:
                        training.leave_weights()
                    self.cache.before_rollout()
                    yield
                    self.cache.after_rollout()
                    self._come_home()
                self._release_copies()  # the first rollout's audit reads both weights and copies
            except BaseException:
                # The run ends, and what it saves may need the room. Nobody waits for another rank here: what has
                # left comes home with the save.
                self.cache.release()
                raise

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """Let the trainer score and take optimizer steps in the block; what rollouts need leaves if room is wanted.

        Raises:
            MemoryExhausted: it did not fit; says what to lower.
        """
        algorithms = strict_algorithms() if self._policy.config.deterministic_mode else contextlib.nullcontext()
        with out_of_memory_reported(self._config, "update"), algorithms:
            self._release_copies()  # a parity check has made them since the rollout
            yield

    @contextlib.contextmanager
    def save(self) -> Iterator[None]:
        """Have weights and optimizer state there in the block, also after a rollout that failed; collective."""
        self._come_home()
        yield

    def _format(self, quantized: bool) -> contextlib.AbstractContextManager[None]:
        if not self.quantization.is_quantized:
            return contextlib.nullcontext()
        return self.quantization.rollout() if quantized else self.quantization.linears.suspended()

    def _release_copies(self) -> None:
        if self.cache.is_released and self.quantization.is_quantized:
            self.quantization.release()

    def _come_home(self) -> None:
        if self.training is not None:
            self.training.come_home()
            if self.cache.is_released:
                self.training.weights.release_aside()

    def _calibrate(self) -> None:
        self.cache.before_rollout()
        engine = self._engine
        with self.quantization.calibrating():
            engine.begin(seed=0, policy_version=0)
            for request in self._prompts():
                engine.submit(request)
            while engine.has_unfinished:
                engine.step()


@contextlib.contextmanager
def out_of_memory_reported(config: RLConfig, phase: Literal["rollout", "update"]) -> Iterator[None]:
    """Report an allocation that fails inside as one line that says what to lower.

    Raises:
        MemoryExhausted: in its place, once the memory that the failed call held is free again.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        # Logits, activations and cache views are alive in the frames of the failed call: saving may need their room.
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        where = "a rollout" if phase == "rollout" else "an update"
        advice = _advice_for_rollouts(config) if phase == "rollout" else _advice_for_updates(config)
        text = f"out of memory in {where} ({reason_of(error)}): {advice}"
        raise MemoryExhausted(text, on_all_ranks=isinstance(error, OutOfMemoryOnAllRanks)) from None


def _advice_for_rollouts(config: RLConfig) -> str:
    rollout = config.rollout
    budget, share = rollout.inference_dynamic_batching_buffer_size_gb, rollout.rl_rollout_memory_fraction
    cache = f"--inference-dynamic-batching-buffer-size-gb ({'not given' if budget is None else budget})"
    if share is not None:
        cache = f"--rl-rollout-memory-fraction ({share:g})"
    offload = ", or give --rl-offload-optimizer-during-inference"
    return (
        f"lower --inference-max-batch-size ({rollout.inference_max_batch_size}), {cache} or --rl-max-new-tokens "
        f"({rollout.rl_max_new_tokens}){'' if rollout.rl_offload_optimizer_during_inference else offload}"
    )


def _advice_for_updates(config: RLConfig) -> str:
    training = config.training
    more = "recompute layers with --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    if config.kernels.recompute_granularity == "full":
        more = "use more tensor-parallel ranks"
    return (
        f"lower --rl-sequence-packing-bin-size ({training.rl_sequence_packing_bin_size}) or --micro-batch-size "
        f"({training.micro_batch_size}), or {more}"
    )


class Training:
    """The memory of training, and which of it rollouts do without."""

    def __init__(
        self, config: RLConfig, optimization: Optimization, critic: Optimization | None,
        quantization: RolloutQuantization,
    ) -> None:  # fmt: skip
        self.optimization = optimization
        self.policy = Holdings(optimization)
        self.critic = None if critic is None else Holdings(critic, with_weights=True)  # no rollout reads any of it
        self.models = [self.policy] if self.critic is None else [self.policy, self.critic]
        self.weights = Weights(optimization, quantization.offloadable)
        self.offloads = config.rollout.rl_offload_optimizer_during_inference
        self._quantization = quantization
        self._keeps = config.rollout.rl_keep_in_rollouts
        self._reads_all_weights = config.quantization.rl_evaluate_unquantized or quantization.wants_calibration
        self._reported = ""

    @property
    def _unread(self) -> list[torch.nn.Parameter]:
        """Weights that quantised rollouts do not read."""
        if "weights" in self._keeps or not self.weights.can_leave:
            return []
        return [layer.module.weight for layer in self._quantization.linears.layers]

    def given_back(self) -> int:
        """Return bytes that every rollout has more than an update, with nothing away now.

        Weights count where all rollouts are quantised: none evaluates without, and none calibrates first.
        """
        unread, size = set(self._unread), 0
        if unread and not self._reads_all_weights:
            read = [parameter for parameter in self.optimization.policy.parameters() if parameter not in unread]
            size = size_of(self.weights.storages) - sum(parameter.nbytes for parameter in read)
        if "gradients" not in self._keeps:
            size += sum(size_of(model.gradients.storages) for model in self.models)
        return size + (sum(size_of(model.state.storages) for model in self.models) if self.offloads else 0)

    def to_come(self, estimate: Estimate) -> int:
        """Return bytes of optimizer state that the first update will make."""
        of_critic = 0 if self.critic is None else max(0, estimate.critic.update - self.critic.size)
        return max(0, estimate.optimizer.update - size_of(self.policy.state.storages)) + of_critic

    def leave(self) -> None:
        """Free gradients, and if that was asked for the optimizer's state and all of the critic."""
        before = sum(size_of(model.state.storages) for model in self.models)
        for model in self.models if "gradients" not in self._keeps else ():
            model.gradients.leave()
        if not self.offloads:
            return
        for model in self.models:
            model.state.leave()
        what = "optimizer state" if self.critic is None else "optimizer state and critic"
        text = f"during rollouts {in_words(before)} of {what} wait on the host"
        if self.optimization.policy.device.type != "cuda":
            text += "; without a GPU the host's memory is the only one, so that gains nothing"
        if text != self._reported:
            logger.info("%s", text)
        self._reported = text

    def leave_weights(self) -> None:
        """Release the weights that have quantised copies, made by now."""
        if unread := self._unread:
            self.weights.leave(unread)

    def come_home(self) -> None:
        """Bring back everything an update needs; collective where weights have left."""
        self.policy.state.come_home()
        self.weights.come_home()
        self.policy.gradients.come_home()
        if self.critic is not None:
            self.critic.state.come_home()
            self.critic.gradients.come_home()
