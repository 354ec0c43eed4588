"""What a configuration means: defaults filled in, broken rules, notes, and itself as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from megatron_rl.config.algorithm import algorithm_problems
from megatron_rl.config.flags import flags_of
from megatron_rl.config.model import expert_problems, shape_problems
from megatron_rl.config.parallel import kernel_problems, parallel_problems
from megatron_rl.config.precision import alignment_problems, cache_problems, engine_problems, precision_problems
from megatron_rl.config.records import record_problems
from megatron_rl.config.rl_config import RLConfig, all_flags, section_classes
from megatron_rl.config.rollout import length_problems, sampling_problems
from megatron_rl.config.training import ScheduleConfig, batch_problems, optimizer_problems, schedule_problems
from megatron_rl.errors import Problem

RULES = (
    record_problems, parallel_problems, shape_problems, expert_problems, batch_problems, length_problems,
    precision_problems, kernel_problems, engine_problems, alignment_problems, cache_problems, optimizer_problems,
    schedule_problems, sampling_problems, algorithm_problems,
)  # fmt: skip
"""Each takes a resolved configuration and the number of ranks, and says nothing where a value it needs is absent."""
_CHANGES_NO_BYTE = ("tokenizer_model", "langrl_env_config", "lr")


def resolve(config: RLConfig, world_size: int) -> RLConfig:
    """``config`` with every derived default filled in; resolving twice changes nothing.

    What the user typed is never overwritten. A value that cannot be derived, because what it derives from is absent
    or wrong, stays None: ``validate`` says so.
    """
    config = config.with_values(**_implied(config))
    if config.training.eval_only:
        config = dataclasses.replace(config, schedule=ScheduleConfig())  # a training command's is of another length
    for flag in all_flags():
        if flag.derived is not None and config.value(flag.name) is None:
            config = config.with_values(**{flag.name: flag.derived(config, world_size)})
    return config


def _implied(config: RLConfig) -> dict[str, Any]:
    """Values that others decide."""
    # Megatron writes "off" as top-p 0 and top-k -1.
    values = {"rl_top_p": config.rollout.rl_top_p or 1.0, "rl_top_k": max(0, config.rollout.rl_top_k)}
    if config.parallel.tensor_model_parallel_size == 1:
        values["sequence_parallel"] = False  # as Megatron does; ``notes`` tells whoever typed the flag
    if config.training.eval_only:  # it takes weights and no step: what only training needs has any value
        values |= {"perform_rl_step": False, "train_samples": None, "train_iters": 1, "eval_interval": 1}
        values |= {"finetune": True, "resume": False, "lr": config.optimizer.lr or 1.0}
    precision = config.precision
    local = config.kernels.transformer_impl != "transformer_engine"  # which has fp8 products of its own
    if local and (precision.fp8_format, precision.fp8_recipe) == ("e4m3", "blockwise"):
        # Aligned training, with the tiles that Transformer Engine's blockwise recipe has.
        aligned = {"rl_rollout_quantization": "fp8_block_pow2", "rl_train_forward": "quantized"}
        unset = {name for name in aligned if name not in config.typed and config.value(name) in ("none", "plain")}
        values |= {name: value for name, value in aligned.items() if name in unset}
    return values


def validate(config: RLConfig, world_size: int) -> list[Problem]:
    """Everything that is wrong with the values; empty when the run may start.

    Files and devices are not looked at: whoever opens them checks them.
    """
    out_of_bounds = list(_bounds(config))
    if out_of_bounds:  # the other rules would divide by a size of 0
        return out_of_bounds
    config = resolve(config, world_size)
    found = (finding for rule in RULES for finding in rule(config, world_size))
    return [*_absent(config), *(each if isinstance(each, Problem) else config.problem(*each) for each in found)]


def _bounds(config: RLConfig) -> Iterator[Problem]:
    """Choices and bounds again, for configurations that were built in code and not parsed."""
    for flag in all_flags():
        value = config.value(flag.name)
        why = None if value is None or flag.many else flag.refusal(value)
        if why is not None:
            yield Problem(flag.spelling, f"{flag.spelling} {why}")


def _absent(config: RLConfig) -> Iterator[Problem]:
    """What is not built, and what has no default: a run needs it, or an RL run; an estimate only what changes bytes."""
    spared = _CHANGES_NO_BYTE if config.training.estimate else ()
    for section, cls in section_classes().items():
        for flag in flags_of(cls) if section != "algorithm" or config.training.perform_rl_step else ():
            if flag.only is not None and config.value(flag.name) != flag.default:
                text = f"is not built yet in this version: {flag.only}; use {flag.spelling} {flag.default}"
                yield config.problem(flag.name, text)
            if flag.needed is not None and config.value(flag.name) is None and flag.name not in spared:
                why, example = flag.needed
                text = f"{flag.spelling} is missing: {why}; for example {flag.spelling} {example}"
                yield Problem(flag.spelling, text)


def notes(config: RLConfig) -> list[str]:
    """One line for each flag that the user set and that has no effect, or not the one it promises, with the reason."""
    used = [flag for flag in all_flags() if flag.note and flag.name in config.typed]
    return [*(f"{flag.spelling} has no effect: {flag.note}" for flag in used), *_notes_on_values(config)]


def _notes_on_values(config: RLConfig) -> Iterator[str]:
    quantization, kernels = config.quantization, config.kernels
    if config.typed.get("sequence_parallel") and config.parallel.tensor_model_parallel_size == 1:
        yield "--sequence-parallel is off: it needs --tensor-model-parallel-size above 1"
    if config.kv_cache_is_rounded and quantization.rl_evaluate_unquantized:
        what = f"--rl-evaluate-unquantized leaves the KV cache in {config.kv_cache_dtype}"
        yield f"{what}, in evaluations too (--rl-kv-cache-dtype)"
    if config.algorithm.grpo_kl_beta > 0 and config.algorithm.rl_kl_estimator == "k1":
        what = "--rl-kl-estimator k1 does not hold the policy to the reference"
        yield f"{what}: the gradient of k1 is 0 in expectation; use k2 or k3"
    if kernels.cuda_graph_impl == "transformer_engine":
        yield (
            "--cuda-graph-impl transformer_engine has no effect: layers are always megatron-core's local ones in this "
            "version; local captures the rollouts' decode step"
        )
    graphed = kernels.enable_cuda_graph or kernels.cuda_graph_impl == "local"
    if graphed and config.rollout.rl_inference_engine == "mcore":
        yield "--enable-cuda-graph has no effect with --rl-inference-engine mcore: only our engine has graphs"
    if config.precision.fp8_format is not None and quantization.rl_train_forward == "quantized":
        yield (
            f"--fp8-format {config.precision.fp8_format} runs the trainer's forward pass on the "
            f"{quantization.rl_rollout_quantization} weights of the rollouts (--rl-train-forward quantized); "
            "Transformer Engine's layers are not built in this version, installed or not"
        )


def to_dict(config: RLConfig) -> dict[str, dict[str, Any]]:
    """Section -> field -> value, of JSON values only."""
    return {
        section: {flag.name: _plain(config.value(flag.name)) for flag in flags_of(cls)}
        for section, cls in section_classes().items()
    }


def difference_from_defaults(config: RLConfig) -> dict[str, Any]:
    """Field -> value, for the fields that are not at their declared default."""
    found = {flag.name: (config.value(flag.name), flag.default) for flag in all_flags()}
    return {name: _plain(value) for name, (value, default) in found.items() if value != default}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
