"""A configuration as data: to save it, to show what differs from the defaults, to compare two runs."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from megatron_rl.config.fields import Flag
from megatron_rl.config.rl_config import RLConfig, all_flags, section_classes

STEERING_SECTIONS = ("logging", "checkpoint", "compatibility")
STEERING_FIELDS = (
    "check", "check_world_size", "estimate", "estimate_vocab_size",
    "config", "hf_config", "exit_duration_in_mins", "exit_grace_seconds", "exit_interval",
    "rl_offload_optimizer_during_inference",
    "distributed_timeout_minutes", "rl_environment_port",
)


def to_dict(config: RLConfig) -> dict[str, dict[str, Any]]:
    """Section -> field -> value, of JSON values only."""
    return {
        section: {f.name: _plain(_value(config, f)) for f in all_flags() if f.section == section}
        for section in section_classes()
    }


def difference_from_defaults(config: RLConfig) -> dict[str, Any]:
    """Field -> value, for the fields that are not at their declared default."""
    return {f.name: _plain(_value(config, f)) for f in all_flags() if _value(config, f) != f.default}


def config_hash(config: RLConfig) -> str:
    """Twelve hex digits that two configurations share when they train alike.

    Where a run writes, when it stops and what it loads or logs does not count.
    """
    counted = {
        f"{f.section}.{f.name}": _plain(_value(config, f))
        for f in all_flags()
        if f.section not in STEERING_SECTIONS and f.name not in STEERING_FIELDS and f.note is None
    }
    return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()[:12]


def notes(config: RLConfig) -> list[str]:
    """One line for each flag that the user set and that has no effect, or not the one it promises, with the reason."""
    used = [flag for flag in all_flags() if flag.note and flag.name in config.typed]
    lines = [f"{flag.spelling} has no effect: {flag.note}" for flag in used]
    if config.typed.get("sequence_parallel") and config.parallel.tensor_model_parallel_size == 1:
        lines.append("--sequence-parallel is off: it needs --tensor-model-parallel-size above 1")
    if config.kv_cache_is_rounded and config.quantization.rl_evaluate_unquantized:
        lines.append(
            f"--rl-evaluate-unquantized leaves the KV cache in {config.kv_cache_dtype}, in evaluations too "
            "(--rl-kv-cache-dtype)"
        )
    if config.algorithm.grpo_kl_beta > 0 and config.algorithm.rl_kl_estimator == "k1":
        lines.append(
            "--rl-kl-estimator k1 does not hold the policy to the reference: the gradient of k1 is 0 in expectation; "
            "use k2 or k3"
        )
    if config.kernels.cuda_graph_impl == "transformer_engine":
        lines.append(
            "--cuda-graph-impl transformer_engine has no effect: layers are always megatron-core's local ones in this "
            "version; local captures the rollouts' decode step"
        )
    graphed = config.kernels.enable_cuda_graph or config.kernels.cuda_graph_impl == "local"
    if graphed and config.rollout.rl_inference_engine == "mcore":
        lines.append("--enable-cuda-graph has no effect with --rl-inference-engine mcore: only our engine has graphs")
    if config.precision.fp8_format is not None and config.quantization.rl_train_forward == "quantized":
        lines.append(
            f"--fp8-format {config.precision.fp8_format} runs the trainer's forward pass on the "
            f"{config.quantization.rl_rollout_quantization} weights of the rollouts (--rl-train-forward quantized); "
            "Transformer Engine's layers are not built in this version, installed or not"
        )
    return lines


def _value(config: RLConfig, flag: Flag) -> Any:
    return getattr(getattr(config, flag.section), flag.name)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
