"""Bytes of a run by phase, from its flags alone: no model, no process group, no torch.

    flags ─► ModelLayout ─► Estimate (bytes by use; activations are an approximation) ─► the table of `--estimate`
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_rl.arithmetic import FEWEST_KEYS, FEWEST_LOGIT_ROWS, LOGITS_AT_ONCE, PRODUCT_ELEMENTS
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.config.rules import teacher_of
from megatron_rl.errors import Problem
from megatron_rl.families import ExpertShare, Layer, Linear, ModelLayout, Stages
from megatron_rl.families.blocks import blocks_of
from megatron_rl.quantization.shapes import skipped, storage_of
from megatron_rl.run.memory.estimate_state import NO_STATE, training_state

MOST_BYTES = 4 * 2**40
"""Of one rank. Beyond the memory of any device there is, and of all but a few hosts."""
_FP32 = 4


@dataclass(frozen=True)
class Estimate:
    """Bytes on each rank unless a name says otherwise; all ranks of a pipeline stage hold as much.

    KV cache and quantised copies stay in both phases unless an update has no room beside them.
    """

    world_size: int
    replicas: int
    """That train on different samples."""
    copies: int
    """Of the model's weights: context-parallel ranks have one each."""
    vocab_size: int
    padded_vocab_size: int
    parameters: int
    """Numbers in one copy of the model, padding of the vocabulary included."""
    parameters_per_rank: int
    cache_slots: int
    """Sequences that are decoded at once; 0 in a run that never generates."""
    weights: int
    weights_in_rollouts: int
    """All, or those that quantised rollouts read; these are then set aside during updates too."""
    gradients: int
    gradients_in_rollouts: int
    optimizer: int
    """From the first update on: fp32 main parameters, moments, and fp32 gradients where the buffer is bf16."""
    optimizer_in_rollouts: int
    quantized: int
    kv_cache: int
    rollout_logits: int
    activations: int
    """An approximation: see `activation_elements`."""
    training_logits: int
    optimizer_on_host: int
    """In the host's memory, pinned: what waits there during rollouts."""
    reference_on_host: int
    """In the host's memory, not the device's: the frozen reference and, during its pass, the policy."""
    teacher: int
    """Its weights, on the device while it scores."""
    teacher_in_rollouts: int
    teacher_pass: int
    """Logits of a bin, and the activations of one layer; approximate."""
    teacher_on_host: int
    """In the host's memory, pinned."""
    critic: int
    """Its weights, gradients and optimizer state. Its updates come before the policy's, and their activations are no
    more."""
    critic_in_rollouts: int
    critic_on_host: int
    """As `optimizer_on_host`; with its weights."""

    @property
    def rollout(self) -> int:
        """The peak of a rollout; 0 in a run that never generates."""
        if not self.cache_slots:
            return 0
        return (
            self.weights_in_rollouts + self.gradients_in_rollouts + self.optimizer_in_rollouts + self.quantized
            + self.kv_cache + self.rollout_logits + self.teacher_in_rollouts + self.critic_in_rollouts
        )  # fmt: skip

    def device_for(self, kv_cache: int, share: float) -> int:
        """A device on which ``share`` of what is free beside the rest of a rollout holds ``kv_cache`` bytes."""
        return self.rollout - self.kv_cache + math.ceil(kv_cache / share)

    @property
    def weights_aside(self) -> int:
        """A copy of the weights that quantised rollouts read unquantised."""
        return self.weights_in_rollouts if self.weights_in_rollouts < self.weights else 0

    @property
    def for_rollouts(self) -> int:
        """What an update has beside its own, and can give up: KV cache, quantised copies, weights set aside."""
        return self.kv_cache + self.quantized + self.weights_aside

    @property
    def passing(self) -> int:
        """What comes and goes in an update: activations and logits of the policy or, before it, the teacher's pass."""
        visits = self.teacher - self.teacher_in_rollouts + self.teacher_pass
        return max(self.activations + self.training_logits, visits)

    @property
    def training(self) -> int:
        """The peak of an update, all of the rollouts in place: at the start of a micro-batch's backward pass."""
        own = self.weights + self.gradients + self.optimizer + self.critic + self.passing + self.teacher_in_rollouts
        return own + self.for_rollouts


def estimate(config: RLConfig, world_size: int, vocab_size: int, stage: int | None = None) -> Estimate:
    """Arithmetic on a resolved configuration without problems; ``vocab_size`` is the tokenizer's.

    Of a rank of pipeline stage ``stage``; None: of the one that takes the most.
    """
    if stage is None:
        stages = range(config.stages.count)
        return max((estimate(config, world_size, vocab_size, one) for one in stages), key=lambda one: one.training)
    layout, copies = config.layout(vocab_size, stage), config.rollout_replicas(world_size)
    whole = ModelLayout.of(layout.architecture, layout.tensor_size, layout.padded_vocab_size)
    number = 2 if config.precision.bf16 else _FP32
    own, critic = training_state(config, layout, copies, world_size), NO_STATE
    if config.wants_critic:
        critic = training_state(config, config.layout(vocab_size, stage, head="value"), copies, world_size)
    rollout, slots, padded = config.rollout, _cache_slots(config), layout.padded_vocab_size
    offloaded, keeps_gradients = (
        rollout.rl_offload_optimizer_during_inference, "gradients" in rollout.rl_keep_in_rollouts
    )
    read = _read_in_rollouts(config, layout)
    storage, linears = storage_of(config.quantization.rl_rollout_quantization), _quantized(config, layout)
    teacher, teacher_pass = _teacher(config, world_size, vocab_size, stage, number)
    teacher_stays = "teacher" in rollout.rl_keep_in_rollouts
    logits = 3 + int(rollout.rl_temperature != 1.0)  # of a decode step: raw, log-probs, cumulative; tempered
    return Estimate(
        world_size=world_size,
        replicas=config.data_parallel_size(world_size),
        copies=copies,
        vocab_size=vocab_size,
        padded_vocab_size=padded,
        parameters=sum(math.prod(parameter.shape) for parameter in whole.parameters),
        parameters_per_rank=own.numbers,
        cache_slots=slots,
        weights=own.weights,
        weights_in_rollouts=own.weights if read is None else read * number,
        gradients=own.gradients,
        gradients_in_rollouts=own.gradients if keeps_gradients else 0,
        optimizer=own.optimizer,
        optimizer_in_rollouts=0 if offloaded else own.optimizer,
        quantized=0 if storage is None else sum(storage.stored_bytes(each.rows, each.columns) for each in linears),
        kv_cache=slots * slot_bytes(config, layout),
        rollout_logits=slots * padded * logits * _FP32,
        activations=activation_elements(config, layout, stage) * number,
        training_logits=_training_logits(config, layout, number),
        # Gradients are not worth a copy there, the next update begins with zeros.
        optimizer_on_host=own.kept if offloaded and slots else 0,
        reference_on_host=2 * own.numbers * number if config.wants_reference else 0,
        teacher=teacher,
        teacher_in_rollouts=teacher if teacher_stays else 0,
        teacher_pass=teacher_pass,
        teacher_on_host=0 if teacher_stays else teacher,
        critic=critic.weights + critic.gradients + critic.optimizer,
        critic_in_rollouts=(
            (0 if offloaded else critic.weights + critic.optimizer) + (critic.gradients if keeps_gradients else 0)
        ),
        critic_on_host=critic.weights + critic.kept if offloaded and slots else 0,
    )


def _teacher(config: RLConfig, world_size: int, vocab_size: int, stage: int, number: int) -> tuple[int, int]:
    """Bytes of the teacher's weights on a rank, and of its pass without gradients; 0 without one."""
    if not config.wants_teacher:
        return 0, 0
    own = teacher_of(config, world_size)
    layout = own.layout(vocab_size, stage)
    weights = sum(parameter.size for parameter in layout.parameters) * number
    activations = activation_elements(own, layout, stage) // len(layout.layers) * number
    return weights, activations + _training_logits(own, layout, number)


def activation_elements(config: RLConfig, layout: ModelLayout, stage: int = 0) -> int:
    """Numbers alive at the start of the backward pass, logits not among them; of the parameters' type. Approximate.

    Numbers kept a layer, with C context-parallel ranks, T = tokens of the bin / C, S = T / tensor-parallel size under
    `--sequence-parallel` (else T), hidden h, and q, k, v, f the widths of queries, keys, values and the MLP on one
    tensor-parallel rank::

        norms               4 S h               inputs and outputs of the two
        attention           T (3 q + k + v)     rotated q, k and v, the result padded and packed
          with qk norms     + T (2 q + k + v)   the projection itself, and q once more
          core recomputed   T (3 q + 2 k + v)   the projection, rotated q and k, the result
          both              T (4 q + 2 k + v)   the same, and q once more
        MLP                 5 T f               fc1 counts twice, the gate after SiLU, the other half, their product
          without gate      2 T f
          recomputed        0

    With C > 1 there are, of one layer at a time, the keys and values of all ranks and those that this one's spans see,
    C T (2 + 1 / 2 C) (k + v).
    Layers recomputed as a whole keep their input S h, once a group, and one group at a time is alive in full. What is
    kept counts once for every micro-batch that a pipeline stage has begun: see `_in_flight`.
    Not in it: padding between sequences of different lengths, statistics of norms and softmax, gradients of
    activations, and what only CPUs keep: the score matrices of short sequences and a second copy at an RMSNorm.
    """
    kernels, tokens = config.kernels, config.padded_bin_size
    border = tokens // config.sequence_shares * config.model.hidden_size
    ends = 2 * border if layout.is_last else 0  # the final norm's input and output
    layers = [4 * border + _inner_elements(layer, config) for layer in layout.layers]
    kept, alive, count = sum(layers), 0, kernels.recompute_num_layers
    if kernels.recompute_granularity == "full" and kernels.recompute_method == "uniform":
        kept, alive = math.ceil(len(layers) / count) * border, count * max(layers)
    elif kernels.recompute_granularity == "full":
        count = min(count * config.stages.chunks, len(layers))  # of each chunk
        kept, alive = count * border + sum(layers[count:]), 0 if layers[count:] else max(layers)
    size = config.parallel.context_parallel_size
    gathered = max(layer.cache.numbers(1) for layer in layout.layers) * (2 * tokens + tokens // (2 * size))
    return math.ceil(kept * _in_flight(config.stages, stage)) + alive + ends + (gathered if size > 1 else 0)


def _in_flight(stages: Stages, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once, where an update has enough of them.

    The first of 4 stages begins 4 before the first comes back. With 2 chunks a stage: 7 half ones for the way to the
    last stage and back, and 4 for the chunk in between.
    """
    after = stages.count - stage - 1
    if stages.chunks == 1:
        return after + 1
    return (2 * after + 1 + (stages.chunks - 1) * stages.count) / stages.chunks


def _inner_elements(layer: Layer, config: RLConfig) -> int:
    """Of attention and MLP."""
    parallel, recomputed = config.parallel, config.kernels.recompute_modules or ()
    share = ExpertShare(tensor_size=parallel.expert_tensor_parallel_size)
    sizes = config.architecture(), parallel.tensor_model_parallel_size, share
    mixer, mlp = blocks_of(layer.kind)
    kept = mixer.kept(*sizes, "core_attn" in recomputed) + mlp.kept(*sizes, "mlp" in recomputed)
    return config.padded_bin_size // parallel.context_parallel_size * kept


def slot_bytes(config: RLConfig, layout: ModelLayout | None = None) -> int:
    """The KV cache of one sequence of full length: see `RLConfig.kv_cache_bytes`."""
    return config.kv_cache_bytes(max(config.rollout.inference_max_seq_length, FEWEST_KEYS), layout)


def _quantized(config: RLConfig, layout: ModelLayout) -> list[Linear]:
    skip = config.quantization.rl_quantization_skip
    return [linear for linear in layout.linears if not skipped(linear.name, skip, config.model.num_layers)]


def _read_in_rollouts(config: RLConfig, layout: ModelLayout) -> int | None:
    """Numbers that quantised rollouts read unquantised; None where the other weights cannot be made again, or stay."""
    made_again = config.precision.bf16 and config.parallel.use_distributed_optimizer
    is_quantized = config.quantization.rl_rollout_quantization != "none"
    if not is_quantized or not made_again or "weights" in config.rollout.rl_keep_in_rollouts:
        return None
    replaced = sum(linear.rows * linear.columns for linear in _quantized(config, layout))
    return sum(parameter.size for parameter in layout.parameters) - replaced


def _cache_slots(config: RLConfig) -> int:
    if not config.training.perform_rl_step and config.training.eval_interval is None:
        return 0
    wanted = config.rollout.inference_max_batch_size
    budget = config.rollout.inference_dynamic_batching_buffer_size_gb
    return wanted if budget is None else min(wanted, int(budget * 2**30 // slot_bytes(config)))


def _training_logits(config: RLConfig, layout: ModelLayout, number: int) -> int:
    """Of a bin, where the head is: saved and their gradient in the model's type, and the fp32 chunks of the pass.

    Fused with the output layer a few rows of them at a time, and the gradient of its weight, in fp32 and once more.
    """
    if not layout.is_last:
        return 0
    tokens = config.padded_bin_size // config.parallel.context_parallel_size
    columns = layout.padded_vocab_size // layout.tensor_size
    temporaries = 4 if config.training.perform_rl_step and config.algorithm.grpo_entropy_term_weight else 2
    if not config.kernels.rl_fused_output_layer:
        logits = tokens * columns
        return 2 * logits * number + temporaries * min(logits, LOGITS_AT_ONCE) * _FP32
    logits = min(tokens, max(FEWEST_LOGIT_ROWS, PRODUCT_ELEMENTS // columns)) * columns
    weight = columns * config.model.hidden_size * (_FP32 + (number if number < _FP32 else 0))
    return logits * number + temporaries * min(logits, LOGITS_AT_ONCE) * _FP32 + weight


def size_problems(config: RLConfig, world_size: int) -> list[Problem]:
    """What fits no machine at all; a device's own memory is the run's to find out.

    For a configuration without other problems. The KV cache counts with one sequence: it takes what is there.
    The tokenizer's vocabulary does not count unless `--vocab-size` says it: reading it takes longer than it matters.
    """
    result = estimate(config, world_size, config.tokenizer.vocab_size or 1)
    state = result.weights + result.gradients + result.optimizer + result.critic + result.quantized
    shorter = "lower --seq-length or --rl-sequence-packing-bin-size"
    uses = {
        "weights, gradients and optimizer state": (state, "use a smaller model or more ranks"),
        "the teacher's weights": (result.teacher, "use a smaller teacher or more ranks"),
        "activations of one bin": (result.activations, shorter),
        "logits of one bin": (result.training_logits, shorter),
    }
    share = config.rollout.rl_rollout_memory_fraction
    if result.cache_slots and share is None:
        uses["the KV cache of one sequence"] = (slot_bytes(config), "lower --inference-max-seq-length")
    elif result.cache_slots:
        whole = f"free memory for one sequence at --rl-rollout-memory-fraction {share:g}"
        uses[whole] = (int(slot_bytes(config) / share), "raise it, or lower --inference-max-seq-length")
    too_much = "TiB on each rank, which is more than any machine has"
    return [
        Problem(None, f"{use} take {size / 2**40:,.1f} {too_much}; {advice}")
        for use, (size, advice) in uses.items()
        if size > MOST_BYTES
    ]
