"""Bytes of a run by phase, from its flags alone: no model, no process group, no torch.

    flags ─► ModelLayout ─► Estimate (bytes by use; activations are an approximation) ─► the table of `--estimate`
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_rl.arithmetic import FEWEST_KEYS
from megatron_rl.config.lora import critic_lora_of, lora_of
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.config.rules import teacher_of
from megatron_rl.errors import Problem
from megatron_rl.families import ModelLayout
from megatron_rl.families.lora import adapters_of
from megatron_rl.families.peft import lora_at
from megatron_rl.metrics.console import format_table
from megatron_rl.quantization.shapes import storage_of
from megatron_rl.run.memory.estimate_parts import (
    FP32,
    NO_STATE,
    activation_elements,
    quantized_linears,
    read_in_rollouts,
    training_logits,
    training_state,
)

MOST_BYTES = 4 * 2**40
"""Of one rank. Beyond the memory of any device there is, and of all but a few hosts."""


@dataclass(frozen=True)
class Use:
    """Bytes of one use on each rank: of the device in rollouts and in updates, and of the host's memory."""

    rollout: int
    update: int
    host: int = 0


@dataclass(frozen=True)
class Sizes:
    """The sizes from which bytes are computed."""

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


@dataclass(frozen=True)
class Estimate:
    """Bytes on each rank; all ranks of a pipeline stage hold as much.

    KV cache and quantised copies stay in both phases unless an update has no room beside them.
    """

    sizes: Sizes
    weights: Use
    """In rollouts all, or those that quantised ones read; these are then set aside during updates too."""
    gradients: Use
    optimizer: Use
    """From the first update on: fp32 main parameters, moments, and fp32 gradients where the buffer is bf16."""
    critic: Use
    """Weights, gradients and optimizer. Its updates come before the policy's, with no more activations."""
    quantized: Use
    kv_cache: Use
    teacher: Use
    """Its weights, on the device while it scores."""
    teacher_pass: Use
    """Logits of a bin, and the activations of one layer; approximate."""
    reference: Use
    activations: Use
    """An approximation: see `activation_elements`."""
    rollout_logits: Use
    training_logits: Use

    @property
    def rollout(self) -> int:
        """The peak of a rollout; 0 in a run that never generates."""
        uses = (each for each in vars(self).values() if isinstance(each, Use))
        return sum(use.rollout for use in uses) if self.sizes.cache_slots else 0

    def device_for(self, kv_cache: int, share: float) -> int:
        """Return a device on which ``share`` of what is free beside the rest of a rollout holds ``kv_cache`` bytes."""
        return self.rollout - self.kv_cache.rollout + math.ceil(kv_cache / share)

    @property
    def weights_aside(self) -> int:
        """A copy of the weights that quantised rollouts read unquantised."""
        return self.weights.rollout if self.weights.rollout < self.weights.update else 0

    @property
    def for_rollouts(self) -> int:
        """Bytes that are not the update's own and can be released: KV cache, quantised copies, weights set aside."""
        return self.kv_cache.update + self.quantized.update + self.weights_aside

    @property
    def passing(self) -> int:
        """Temporary bytes of an update: activations and logits of the policy or, before it, the teacher's pass."""
        visits = self.teacher.update - self.teacher.rollout + self.teacher_pass.update
        return max(self.activations.update + self.training_logits.update, visits)

    @property
    def training(self) -> int:
        """The peak of an update, all of the rollouts in place: at the start of a micro-batch's backward pass."""
        held = sum(use.update for use in (self.weights, self.gradients, self.optimizer, self.critic))
        return held + self.teacher.rollout + self.passing + self.for_rollouts


def estimate(config: RLConfig, world_size: int, vocab_size: int, stage: int | None = None) -> Estimate:
    """Estimate from a resolved configuration without problems; ``vocab_size`` is the tokenizer's.

    Of a rank of pipeline stage ``stage``; None: of the one that takes the most.
    """
    if stage is None:
        stages = range(config.stages.count)
        return max((estimate(config, world_size, vocab_size, one) for one in stages), key=lambda one: one.training)
    layout, copies = config.layout(vocab_size, stage), config.rollout_replicas(world_size)
    whole = ModelLayout.of(layout.architecture, layout.tensor_size, layout.padded_vocab_size)
    lora = lora_of(config)
    policy, critic = training_state(config, layout, copies, world_size, lora), NO_STATE
    if config.wants_critic:
        own, of_values = critic_lora_of(config), config.layout(vocab_size, stage, head="value")
        critic = training_state(config, of_values, copies, world_size, own, on_another=own is not None)
    sizes = Sizes(
        world_size=world_size, replicas=config.data_parallel_size(world_size), copies=copies, vocab_size=vocab_size,
        padded_vocab_size=layout.padded_vocab_size,
        parameters=sum(math.prod(parameter.shape) for parameter in whole.parameters),
        parameters_per_rank=policy.numbers, cache_slots=_cache_slots(config),
    )  # fmt: skip
    number, keeps = 2 if config.precision.bf16 else FP32, config.rollout.rl_keep_in_rollouts
    offloads = config.rollout.rl_offload_optimizer_during_inference
    waits_on_host = offloads and sizes.cache_slots > 0
    keeps_gradients = "gradients" in keeps
    keeps_teacher = "teacher" in keeps or config.teacher.rl_teacher_lora is not None
    read, storage = read_in_rollouts(config, layout), storage_of(config.quantization.rl_rollout_quantization)
    linears = () if storage is None else quantized_linears(config, layout)
    quantized = sum(storage.stored_bytes(each.rows, each.columns) for each in linears)
    cache = sizes.cache_slots * slot_bytes(config, layout)
    logits = 3 + int(config.rollout.rl_temperature != 1.0)  # of a decode step: raw, log-probs, cumulative; tempered
    of_critic = critic.weights + critic.optimizer
    teacher, teacher_pass = _teacher(config, world_size, vocab_size, stage, number)
    return Estimate(
        sizes,
        weights=Use(policy.weights if read is None else read * number, policy.weights),
        gradients=Use(policy.gradients if keeps_gradients else 0, policy.gradients),
        # On the host gradients are not worth a copy: the next update begins with zeros.
        optimizer=Use(0 if offloads else policy.optimizer, policy.optimizer, policy.kept if waits_on_host else 0),
        critic=Use(
            (0 if offloads else of_critic) + (critic.gradients if keeps_gradients else 0),
            of_critic + critic.gradients,
            critic.weights + critic.kept if waits_on_host else 0,
        ),
        quantized=Use(quantized, quantized),
        kv_cache=Use(cache, cache),
        teacher=Use(teacher if keeps_teacher else 0, teacher, 0 if keeps_teacher else teacher),
        teacher_pass=Use(0, teacher_pass),
        reference=Use(0, 0, 2 * policy.numbers * number if config.wants_reference and lora is None else 0),
        activations=Use(0, activation_elements(config, layout, stage) * number),
        rollout_logits=Use(sizes.cache_slots * layout.padded_vocab_size * logits * FP32, 0),
        training_logits=Use(0, training_logits(config, layout, number, learns=lora is None)),
    )


def _teacher(config: RLConfig, world_size: int, vocab_size: int, stage: int, number: int) -> tuple[int, int]:
    """Bytes of the teacher's weights on a rank, and of its pass without gradients; 0 without one."""
    if not config.wants_teacher:
        return 0, 0
    own = teacher_of(config, world_size)
    layout = own.layout(vocab_size, stage)
    if config.teacher.rl_teacher_lora is None:
        weights = sum(parameter.size for parameter in layout.parameters) * number
    else:  # the base is the policy's
        parts = adapters_of(layout, lora_at(config.teacher.rl_teacher_lora))
        weights = sum(each.size for part in parts for each in (part.a, part.b)) * number
    activations = activation_elements(own, layout, stage) // len(layout.layers) * number
    return weights, activations + training_logits(own, layout, number, learns=False)


def slot_bytes(config: RLConfig, layout: ModelLayout | None = None) -> int:
    """Return the KV cache of one sequence of full length: see `RLConfig.kv_cache_bytes`."""
    return config.kv_cache_bytes(max(config.rollout.inference_max_seq_length, FEWEST_KEYS), layout)


def _cache_slots(config: RLConfig) -> int:
    if not config.training.perform_rl_step and config.training.eval_interval is None:
        return 0
    wanted = config.rollout.inference_max_batch_size
    budget = config.rollout.inference_dynamic_batching_buffer_size_gb
    return wanted if budget is None else min(wanted, int(budget * 2**30 // slot_bytes(config)))


def size_problems(config: RLConfig, world_size: int) -> list[Problem]:
    """Find what fits no machine at all; a device's own memory is checked by the run.

    For a configuration without other problems. The KV cache counts with one sequence: it takes what is there.
    The tokenizer's vocabulary does not count unless `--vocab-size` says it: reading it takes longer than it matters.
    """
    result = estimate(config, world_size, config.tokenizer.vocab_size or 1)
    state = (result.weights, result.gradients, result.optimizer, result.critic, result.quantized)
    shorter = "lower --seq-length or --rl-sequence-packing-bin-size"
    uses = {
        "weights, gradients and optimizer state": (
            sum(use.update for use in state), "use a smaller model or more ranks"
        ),
        "the teacher's weights": (result.teacher.update, "use a smaller teacher or more ranks"),
        "activations of one bin": (result.activations.update, shorter),
        "logits of one bin": (result.training_logits.update, shorter),
    }
    share = config.rollout.rl_rollout_memory_fraction
    if result.sizes.cache_slots and share is None:
        uses["the KV cache of one sequence"] = (slot_bytes(config), "lower --inference-max-seq-length")
    elif result.sizes.cache_slots:
        whole = f"free memory for one sequence at --rl-rollout-memory-fraction {share:g}"
        uses[whole] = (int(slot_bytes(config) / share), "raise it, or lower --inference-max-seq-length")
    too_much = "TiB on each rank, which is more than any machine has"
    return [
        Problem(None, f"{use} take {size / 2**40:,.1f} {too_much}; {advice}")
        for use, (size, advice) in uses.items()
        if size > MOST_BYTES
    ]


def report_text(config: RLConfig, result: Estimate) -> str:
    """Return a table of bytes by use and phase, and the sums."""
    sizes = result.sizes
    rows = [
        (name, *(in_words(size) if size else "-" for size in (held, update, most * sizes.world_size)), what)
        for name, rollout, update, what in _rows(config, result)
        if (most := max(rollout, update))
        for held in [rollout if sizes.cache_slots else 0]
    ]
    stages, context = config.stages.count, config.parallel.context_parallel_size
    pipeline, fullest = (f" x pipeline {stages}", " of the fullest stage") if stages > 1 else ("", "")
    pipeline += f" x context {context}" if context > 1 else ""
    lines = [
        f"{sizes.parameters:,} parameters, {sizes.parameters_per_rank:,} a rank{fullest}; vocabulary "
        f"{sizes.vocab_size:,}, padded to {sizes.padded_vocab_size:,}; ranks: {sizes.world_size:,} "
        f"(tensor {config.parallel.tensor_model_parallel_size}{pipeline} x data {sizes.replicas})",
        "",
        format_table(("memory", "rollout", "training", "all ranks", "what"), rows),
        "",
    ]
    for phase, total in (("rollout", result.rollout), ("training", result.training)):
        if total:
            lines.append(f"{phase}: {in_words(total)} a rank, {in_words(total * sizes.world_size)} in all")
    cache, share = result.kv_cache.rollout, config.rollout.rl_rollout_memory_fraction
    if cache:
        alone = in_words(result.training - result.for_rollouts)
        lines[-1] += f"; {alone} a rank where what is the rollouts' has to go meanwhile"
    if cache and share is not None:
        one, all_of_them = (in_words(result.device_for(size, share)) for size in (slot_bytes(config), cache))
        lines.append(
            f"--rl-rollout-memory-fraction {share:g}: what is free holds one sequence from {one} of device memory on, "
            f"and the largest batch from {all_of_them} on"
        )
    for use, what, how in (
        (result.optimizer, "optimizer state, in host memory during rollouts", ", pinned"),
        (result.critic, "critic, in host memory during rollouts", ", pinned"),
        (result.reference, "reference policy, in host memory", " (a frozen copy, and one to swap)"),
        (result.teacher, "teacher, in host memory unless it scores", ", pinned"),
    ):
        if use.host:
            lines.append(f"{what}: {in_words(use.host)} a rank{how}")
    return "\n".join(lines)


def _states(config: RLConfig, dtype: str, gradients: str) -> str:
    """What the optimizer keeps, in words."""
    moments = {config.precision.exp_avg_dtype: None, config.precision.exp_avg_sq_dtype: None}  # each once, in order
    in_fp32 = ["main parameters"] if dtype == "bf16" else []
    if list(moments) == ["fp32"]:
        in_fp32 += ["moments" if config.optimizer.optimizer == "adam" else "momentum"]
    in_fp32 += ["gradients"] if gradients == "bf16" else []
    found = [f"fp32 {' and '.join(in_fp32)}"] if in_fp32 else []
    found += [] if list(moments) == ["fp32"] else [f"moments in {' and '.join(moments)}"]
    return ", ".join(found)


def _rows(config: RLConfig, result: Estimate) -> Iterator[tuple[str, int, int, str]]:
    """Name, bytes in rollouts, bytes in training, and what it is."""
    dtype = "bf16" if config.precision.bf16 else "fp32"
    gradients = "fp32" if config.precision.accumulate_allreduce_grads_in_fp32 else dtype
    tokens, slots = config.training.rl_sequence_packing_bin_size, result.sizes.cache_slots
    partly = "; in rollouts without those that are quantised" if result.weights_aside and slots else ""
    yield "weights", result.weights.rollout, result.weights.update + result.weights_aside, f"{dtype}{partly}"
    shared = f", spread over {result.sizes.copies} ranks" if config.parallel.use_distributed_optimizer else ""
    whole_batch = slots == config.rollout.inference_max_batch_size
    sized = "the largest batch; fewer where they do not fit" if whole_batch else "as many as its budget holds"
    stored = f" in {config.kv_cache_dtype}" if config.kv_cache_is_rounded else ""
    weights = "weights" if critic_lora_of(config) is None else "adapters and head on the policy's base"
    visits = "" if result.teacher.rollout else "; there while it scores, before the first update"
    for name, use, what in (
        ("gradients", result.gradients, f"{gradients} buffer"),
        ("optimizer", result.optimizer, f"{_states(config, dtype, gradients)}{shared}{_off(result.optimizer)}"),
        ("critic", result.critic, f"{weights}, gradients and optimizer{_off(result.critic)}"),
        ("quantised weights", result.quantized, f"{config.quantization.rl_rollout_quantization}, linear layers"),
        (
            "KV cache", result.kv_cache,
            f"{slots} sequences of {config.rollout.inference_max_seq_length} tokens{stored}, {sized}",
        ),
        ("teacher", result.teacher, f"{dtype}, frozen{visits}"),
        ("teacher's pass", result.teacher_pass, "logits of a bin and a layer's activations; approximate"),
        ("activations", result.activations, f"{tokens} tokens, {_recomputation(config)}; approximate"),
        ("logits, rollout", result.rollout_logits, f"{slots} rows of the whole vocabulary, fp32"),
        ("logits, training", result.training_logits, f"{tokens} rows of this rank's part; gradient of the head"),
    ):  # fmt: skip
        yield name, use.rollout, use.update, what


def _off(use: Use) -> str:
    return "; off in rollouts" if use.host else ""


def _recomputation(config: RLConfig) -> str:
    kernels = config.kernels
    if kernels.recompute_granularity == "full":
        return f"layers recomputed ({kernels.recompute_method}, {kernels.recompute_num_layers})"
    if kernels.recompute_granularity == "selective":
        return f"{' and '.join(kernels.recompute_modules)} recomputed"
    return "nothing recomputed"


def in_words(size: int) -> str:
    """Write bytes for people."""
    size = max(size, 0)
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.2f} MiB"
