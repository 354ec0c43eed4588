"""Bytes on one rank by use, and their sums by phase."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config import RLConfig
from megatron_rl.estimate.activations import activation_elements
from megatron_rl.estimate.parameters import (
    buffer_elements,
    padded_vocabulary,
    parameter_sizes,
    whole_model_parameters,
)
from megatron_rl.quantization.names import quantizable_linears, skipped
from megatron_rl.quantization.storage import stored_bytes

_FP32 = 4
FEWEST_KEYS = 16
"""The shortest sequence the rollout engine's cache has room for."""
CHUNK_ELEMENTS = 2**26
"""Logits whose fp32 copies the log-prob pass holds at a time."""


@dataclass(frozen=True)
class Estimate:
    """Bytes on each rank unless a name says otherwise; all ranks hold as much.

    Weights and quantised copies stay in place in both phases. So do gradients and optimizer state, unless they
    are off during rollouts, and the KV cache, unless an update has no room beside it.
    """

    world_size: int
    replicas: int
    vocab_size: int
    padded_vocab_size: int
    parameters: int
    """Numbers in one copy of the model, padding of the vocabulary included."""
    parameters_per_rank: int
    cache_slots: int
    """Sequences that are decoded at once; 0 in a run that never generates."""
    weights: int
    gradients: int
    optimizer: int
    """From the first update on: fp32 main parameters, moments, and fp32 gradients where the buffer is bf16."""
    quantized: int
    kv_cache: int
    rollout_logits: int
    activations: int
    """An approximation: see ``megatron_rl.estimate.activations``."""
    training_logits: int
    optimizer_is_offloaded: bool
    """Rollouts have no optimizer state and no gradients on the device."""
    optimizer_on_host: int
    """In the host's memory, pinned: what waits there during rollouts."""
    reference_on_host: int
    """In the host's memory, not the device's: the frozen reference and, during its pass, the policy."""

    @property
    def rollout(self) -> int:
        """The peak of a rollout; 0 in a run that never generates."""
        if not self.cache_slots:
            return 0
        of_training = 0 if self.optimizer_is_offloaded else self.gradients + self.optimizer
        return self.weights + of_training + self.quantized + self.kv_cache + self.rollout_logits

    @property
    def training(self) -> int:
        """The peak of an update, the KV cache in place: at the start of a micro-batch's backward pass."""
        state = self.weights + self.gradients + self.optimizer + self.quantized
        return state + self.kv_cache + self.activations + self.training_logits


def estimate(config: RLConfig, world_size: int, vocab_size: int) -> Estimate:
    """Arithmetic on a resolved configuration without problems; ``vocab_size`` is the tokenizer's."""
    padded = padded_vocabulary(config, vocab_size)
    sizes = parameter_sizes(config, padded).values()
    replicas, held = config.data_parallel_size(world_size), sum(sizes)
    buffer = buffer_elements(sizes, config, replicas)
    slots = _cache_slots(config)
    return Estimate(
        world_size=world_size,
        replicas=replicas,
        vocab_size=vocab_size,
        padded_vocab_size=padded,
        parameters=whole_model_parameters(config, padded),
        parameters_per_rank=held,
        cache_slots=slots,
        # With the distributed optimizer parameters lie in a buffer that is padded like the gradients'.
        weights=buffer * number_bytes(config),
        gradients=buffer * _gradient_bytes(config),
        optimizer=_optimizer_bytes(config, held, buffer, replicas),
        quantized=_quantized_bytes(config),
        kv_cache=slots * slot_bytes(config),
        rollout_logits=_rollout_logits(config, slots, padded),
        activations=activation_elements(config) * number_bytes(config),
        training_logits=_training_logits(config, padded),
        optimizer_is_offloaded=config.rollout.rl_offload_optimizer_during_inference,
        optimizer_on_host=_offloaded_bytes(config, held, buffer, replicas) if slots else 0,
        reference_on_host=2 * held * number_bytes(config) if _has_reference(config) else 0,
    )


def number_bytes(config: RLConfig) -> int:
    """Bytes of a parameter and of an activation."""
    return 2 if config.precision.bf16 else _FP32


def _gradient_bytes(config: RLConfig) -> int:
    return _FP32 if config.precision.accumulate_allreduce_grads_in_fp32 else number_bytes(config)


def _optimizer_bytes(config: RLConfig, held: int, buffer: int, replicas: int) -> int:
    """Of the rank with the largest shard; the buffer's padding has no state, but a shard may be all parameters."""
    copied_gradients = int(_gradient_bytes(config) != _FP32)
    return _FP32 * (_state_numbers(config) + copied_gradients) * _updated(config, held, buffer, replicas)


def _offloaded_bytes(config: RLConfig, held: int, buffer: int, replicas: int) -> int:
    """The same without gradients: they are not worth a copy, the next update begins with zeros."""
    if not config.rollout.rl_offload_optimizer_during_inference:
        return 0
    return _FP32 * _state_numbers(config) * _updated(config, held, buffer, replicas)


def _state_numbers(config: RLConfig) -> int:
    """fp32 numbers that the optimizer keeps for every one it updates."""
    moments = 2 if config.optimizer.optimizer == "adam" else int(config.optimizer.sgd_momentum > 0)
    return moments + int(config.precision.bf16)  # fp32 parameters are their own main parameters


def _updated(config: RLConfig, held: int, buffer: int, replicas: int) -> int:
    return min(held, buffer // replicas) if config.parallel.use_distributed_optimizer else held


def _quantized_bytes(config: RLConfig) -> int:
    settings = config.quantization
    recipe = settings.rl_rollout_quantization.replace("-", "_")
    return sum(
        stored_bytes(recipe, linear.rows, linear.columns)
        for linear in quantizable_linears(config)
        if not skipped(linear.name, settings.rl_quantization_skip, config.model.num_layers)
    )


def slot_bytes(config: RLConfig) -> int:
    """Keys and values of one sequence of full length."""
    model, parts = config.model, config.parallel.tensor_model_parallel_size
    groups = max(1, model.num_query_groups // parts)
    length = max(config.rollout.inference_max_seq_length, FEWEST_KEYS)
    return 2 * model.num_layers * groups * model.kv_channels * length * config.kv_number_bytes


def _cache_slots(config: RLConfig) -> int:
    if not config.training.perform_rl_step and config.training.eval_interval is None:
        return 0
    wanted = config.rollout.inference_max_batch_size
    budget = config.rollout.inference_dynamic_batching_buffer_size_gb
    return wanted if budget is None else min(wanted, int(budget * 2**30 // slot_bytes(config)))


def _rollout_logits(config: RLConfig, slots: int, padded: int) -> int:
    """Of one decode step, gathered from all ranks, fp32: raw, log-probs and cumulative, and tempered."""
    copies = 3 + int(config.rollout.rl_temperature != 1.0)
    return slots * padded * copies * _FP32


def _training_logits(config: RLConfig, padded: int) -> int:
    """Of a bin on this rank: saved and their gradient in the model's type, and the fp32 chunks of the pass."""
    logits = config.training.rl_sequence_packing_bin_size * padded // config.parallel.tensor_model_parallel_size
    temporaries = 4 if config.training.perform_rl_step and config.algorithm.grpo_entropy_term_weight else 2
    return 2 * logits * number_bytes(config) + temporaries * min(logits, CHUNK_ELEMENTS) * _FP32


def _has_reference(config: RLConfig) -> bool:
    return config.training.perform_rl_step and config.algorithm.grpo_kl_beta > 0
