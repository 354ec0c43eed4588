"""The table that `--estimate` prints."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.metrics.console import format_table
from megatron_rl.run.memory.estimate import Estimate, slot_bytes


def report_text(config: RLConfig, result: Estimate) -> str:
    """A table of bytes by use and phase, and the sums."""
    rows = [
        (name, _bytes(rollout if result.cache_slots else 0), _bytes(training), _bytes(most * result.world_size), what)
        for name, rollout, training, what in _uses(config, result)
        if (most := max(rollout, training))
    ]
    stages, context = config.stages.count, config.parallel.context_parallel_size
    pipeline, fullest = (f" x pipeline {stages}", " of the fullest stage") if stages > 1 else ("", "")
    pipeline += f" x context {context}" if context > 1 else ""
    lines = [
        f"{result.parameters:,} parameters, {result.parameters_per_rank:,} a rank{fullest}; vocabulary "
        f"{result.vocab_size:,}, padded to {result.padded_vocab_size:,}; ranks: {result.world_size:,} "
        f"(tensor {config.parallel.tensor_model_parallel_size}{pipeline} x data {result.replicas})",
        "",
        format_table(("memory", "rollout", "training", "all ranks", "what"), rows),
        "",
    ]
    for phase, total in (("rollout", result.rollout), ("training", result.training)):
        if total:
            lines.append(f"{phase}: {_bytes(total)} a rank, {_bytes(total * result.world_size)} in all")
    if result.kv_cache:
        alone = _bytes(result.training - result.for_rollouts)
        lines[-1] += f"; {alone} a rank where what is the rollouts' has to go meanwhile"
    share = config.rollout.rl_rollout_memory_fraction
    if result.kv_cache and share is not None:
        one, all_of_them = (_bytes(result.device_for(size, share)) for size in (slot_bytes(config), result.kv_cache))
        lines.append(
            f"--rl-rollout-memory-fraction {share:g}: what is free holds one sequence from {one} of device memory on, "
            f"and the largest batch from {all_of_them} on"
        )
    if result.optimizer_on_host:
        total = _bytes(result.optimizer_on_host)
        lines.append(f"optimizer state, in host memory during rollouts: {total} a rank, pinned")
    if result.critic_on_host:
        total = _bytes(result.critic_on_host)
        lines.append(f"critic, in host memory during rollouts: {total} a rank, pinned")
    if result.reference_on_host:
        total = _bytes(result.reference_on_host)
        lines.append(f"reference policy, in host memory: {total} a rank (a frozen copy, and one to swap)")
    if result.teacher_on_host:
        total = _bytes(result.teacher_on_host)
        lines.append(f"teacher, in host memory unless it scores: {total} a rank, pinned")
    return "\n".join(lines)


def _uses(config: RLConfig, result: Estimate) -> Iterator[tuple[str, int, int, str]]:
    """Name, bytes in rollouts, bytes in training, and what it is."""
    dtype = "bf16" if config.precision.bf16 else "fp32"
    gradients = "fp32" if config.precision.accumulate_allreduce_grads_in_fp32 else dtype
    tokens, slots = config.training.rl_sequence_packing_bin_size, result.cache_slots
    partly = "; in rollouts without those that are quantised" if result.weights_aside and slots else ""
    yield "weights", result.weights_in_rollouts, result.weights + result.weights_aside, f"{dtype}{partly}"
    yield "gradients", result.gradients_in_rollouts, result.gradients, f"{gradients} buffer"
    states = ["main parameters"] if dtype == "bf16" else []
    states += ["moments" if config.optimizer.optimizer == "adam" else "momentum"]
    states += ["gradients"] if gradients == "bf16" else []
    shared = f", spread over {result.copies} ranks" if config.parallel.use_distributed_optimizer else ""
    away = "; off in rollouts" if result.optimizer_on_host else ""
    what = f"fp32 {' and '.join(states)}{shared}{away}"
    yield "optimizer", result.optimizer_in_rollouts, result.optimizer, what
    away = "; off in rollouts" if result.critic_on_host else ""
    yield "critic", result.critic_in_rollouts, result.critic, f"weights, gradients and optimizer{away}"
    what = f"{config.quantization.rl_rollout_quantization}, linear layers"
    yield "quantised weights", result.quantized, result.quantized, what
    whole_batch = slots == config.rollout.inference_max_batch_size
    sized = "the largest batch; fewer where they do not fit" if whole_batch else "as many as its budget holds"
    stored = f" in {config.kv_cache_dtype}" if config.kv_cache_is_rounded else ""
    what = f"{slots} sequences of {config.rollout.inference_max_seq_length} tokens{stored}, {sized}"
    yield "KV cache", result.kv_cache, result.kv_cache, what
    what = f"{dtype}, frozen{'' if result.teacher_in_rollouts else '; there while it scores, before the first update'}"
    yield "teacher", result.teacher_in_rollouts, result.teacher, what
    yield "teacher's pass", 0, result.teacher_pass, "logits of a bin and a layer's activations; approximate"
    yield "activations", 0, result.activations, f"{tokens} tokens, {_recomputation(config)}; approximate"
    yield "logits, rollout", result.rollout_logits, 0, f"{slots} rows of the whole vocabulary, fp32"
    yield "logits, training", 0, result.training_logits, f"{tokens} rows of this rank's part, and their gradient"


def _recomputation(config: RLConfig) -> str:
    kernels = config.kernels
    if kernels.recompute_granularity == "full":
        return f"layers recomputed ({kernels.recompute_method}, {kernels.recompute_num_layers})"
    if kernels.recompute_granularity == "selective":
        return f"{' and '.join(kernels.recompute_modules)} recomputed"
    return "nothing recomputed"


def _bytes(count: int) -> str:
    if count == 0:
        return "-"
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.2f} MiB"
