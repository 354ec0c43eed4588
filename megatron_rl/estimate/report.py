"""From a configuration to the estimate as text, or to what keeps it from being made."""

from __future__ import annotations

import os

from megatron_rl.config import RLConfig
from megatron_rl.errors import ConfigError, Problem
from megatron_rl.estimate.memory import Estimate, estimate, slot_bytes
from megatron_rl.metrics.table import format_table
from megatron_rl.quantization.shapes import layer_problems, tile_problem
from megatron_rl.registry import RECIPES

MOST_BYTES = 4 * 2**40
"""Of one rank. Beyond the memory of any device there is, and of all but a few hosts."""

_MODEL = "use a smaller model or more ranks"
_BIN = "lower --seq-length or --rl-sequence-packing-bin-size"


def quantization_problems(config: RLConfig) -> list[Problem]:
    """As far as they are known without torch."""
    name = config.quantization.rl_rollout_quantization.replace("-", "_")
    if ":" not in name and name not in RECIPES.names():
        text = f": there is no such recipe; use one of {', '.join(RECIPES.names())}"
        return [config.problem("rl_rollout_quantization", text)]
    if name == "none":
        return []
    has_tiles = name.startswith("fp8_block")
    return layer_problems(config, tile_problem if has_tiles else lambda *_: None)


def size_problems(config: RLConfig, world_size: int) -> list[Problem]:
    """What fits no machine at all; a device's own memory is the run's to find out.

    For a configuration without other problems. The KV cache counts with one sequence: it takes what is there.
    The tokenizer's vocabulary does not count unless `--vocab-size` says it: reading it takes longer than it matters.
    """
    result = estimate(config, world_size, config.tokenizer.vocab_size or 1)
    uses = {
        "weights, gradients and optimizer state": (result.state, _MODEL),
        "activations of one bin": (result.activations, _BIN),
        "logits of one bin": (result.training_logits, _BIN),
    }
    if result.cache_slots:
        uses["the KV cache of one sequence"] = (slot_bytes(config), "lower --inference-max-seq-length")
    too_much = "TiB on each rank, which is more than any machine has"
    return [
        Problem(None, f"{use} take {size / 2**40:,.1f} {too_much}; {advice}")
        for use, (size, advice) in uses.items()
        if size > MOST_BYTES
    ]


def vocabulary(config: RLConfig) -> int:
    """`--estimate-vocab-size`, or else the tokenizer's.

    Raises:
        ConfigError: neither is there; names the flag to give.
    """
    if config.training.estimate_vocab_size is not None:
        return config.training.estimate_vocab_size
    advice = "give --estimate-vocab-size N, for example --estimate-vocab-size 151936"
    path = config.tokenizer.tokenizer_model
    if path is None and config.tokenizer.vocab_size is not None:
        return config.tokenizer.vocab_size
    if path is None:
        raise ConfigError([f"without --tokenizer-model the size of the vocabulary is unknown; {advice}"])
    # A name that is in no cache would be looked up on the hub, again and again where there is no network.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from megatron_rl.tokenizer import load_tokenizer

    try:
        return load_tokenizer(path).vocab_size
    except ConfigError as error:
        raise ConfigError([f"the size of the vocabulary is unknown; {advice} ({error.lines[0]})"]) from error


def report_text(config: RLConfig, result: Estimate) -> str:
    """A table of bytes by use and phase, and the sums."""
    headers = ("memory", "rollout", "training", "all ranks", "what")
    generates = result.cache_slots > 0
    rows = [
        (name, _bytes(rollout if generates else 0), _bytes(training), _bytes(most * result.world_size), what)
        for name, rollout, training, what in _uses(config, result)
        if (most := max(rollout, training))
    ]
    lines = [_headline(config, result), "", format_table(headers, rows), ""]
    for phase, total in (("rollout", result.rollout), ("training", result.training)):
        if total:
            lines.append(f"{phase}: {_bytes(total)} a rank, {_bytes(total * result.world_size)} in all")
    if result.kv_cache:
        alone = result.training - result.for_rollouts
        lines[-1] += f"; {_bytes(alone)} a rank where what is the rollouts' has to go meanwhile"
    if result.optimizer_on_host:
        total = result.optimizer_on_host
        lines.append(f"optimizer state, in host memory during rollouts: {_bytes(total)} a rank, pinned")
    if result.reference_on_host:
        total = result.reference_on_host
        lines.append(f"reference policy, in host memory: {_bytes(total)} a rank (a frozen copy, and one to swap)")
    return "\n".join(lines)


def _headline(config: RLConfig, result: Estimate) -> str:
    parts = config.parallel.tensor_model_parallel_size
    return (
        f"{result.parameters:,} parameters, {result.parameters_per_rank:,} a rank; vocabulary "
        f"{result.vocab_size:,}, padded to {result.padded_vocab_size:,}; ranks: {result.world_size:,} "
        f"(tensor {parts} x data {result.replicas})"
    )


def _uses(config: RLConfig, result: Estimate) -> list[tuple[str, int, int, str]]:
    """Name, bytes in rollouts, bytes in training, and what it is."""
    dtype = "bf16" if config.precision.bf16 else "fp32"
    gradients = "fp32" if config.precision.accumulate_allreduce_grads_in_fp32 else dtype
    tokens = config.training.rl_sequence_packing_bin_size
    shared = f", spread over {result.replicas} ranks" if config.parallel.use_distributed_optimizer else ""
    length = config.rollout.inference_max_seq_length
    quantized = config.quantization.rl_rollout_quantization
    generates = result.cache_slots > 0
    whole_batch = result.cache_slots == config.rollout.inference_max_batch_size
    sized = "the largest batch; fewer where they do not fit" if whole_batch else "as many as its budget holds"
    stored = f" in {config.kv_cache_dtype}" if config.kv_cache_is_rounded else ""

    def resident(name: str, size: int, what: str) -> tuple[str, int, int, str]:
        return name, size, size, what

    read = result.weights_in_rollouts < result.weights
    aside = result.weights_in_rollouts if read else 0
    away = "; off in rollouts" if result.optimizer_is_offloaded and generates else ""
    return [
        (
            "weights", result.weights_in_rollouts, result.weights + aside,
            f"{dtype}{'; in rollouts without those that are quantised' if read and generates else ''}",
        ),
        ("gradients", result.gradients_in_rollouts, result.gradients, f"{gradients} buffer"),
        ("optimizer", result.optimizer_in_rollouts, result.optimizer, f"fp32 {_states(config)}{shared}{away}"),
        resident("quantised weights", result.quantized, f"{quantized}, linear layers"),
        resident("KV cache", result.kv_cache, f"{result.cache_slots} sequences of {length} tokens{stored}, {sized}"),
        ("activations", 0, result.activations, f"{tokens} tokens, {_recomputation(config)}; approximate"),
        ("logits, rollout", result.rollout_logits, 0, f"{result.cache_slots} rows of the whole vocabulary, fp32"),
        ("logits, training", 0, result.training_logits, f"{tokens} rows of this rank's part, and their gradient"),
    ]


def _states(config: RLConfig) -> str:
    states = ["main parameters"] if config.precision.bf16 else []
    states.append("moments" if config.optimizer.optimizer == "adam" else "momentum")
    if config.precision.bf16 and not config.precision.accumulate_allreduce_grads_in_fp32:
        states.append("gradients")
    return " and ".join(states)


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
