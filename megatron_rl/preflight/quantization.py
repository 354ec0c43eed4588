"""Recipes, the device and the layers' shapes, before there is a model."""

from __future__ import annotations

import importlib.util

from megatron_rl.config import RLConfig
from megatron_rl.errors import ConfigError
from megatron_rl.quantization import get_recipe
from megatron_rl.quantization.names import quantizable_linears, skipped, unmatched_patterns


def quantization_problems(config: RLConfig) -> list[str]:
    """One line for everything that would fail once the model is built."""
    return [*_transformer_engine(config), *_recipe(config)]


def _transformer_engine(config: RLConfig) -> list[str]:
    if config.typed.get("transformer_impl") != "transformer_engine" or transformer_engine_is_installed():
        return []
    return [
        "--transformer-impl transformer_engine, but Transformer Engine is not installed; install it with "
        "pip install 'megatron-rl[te]' (GPU machines only), or use --transformer-impl local"
    ]


def transformer_engine_is_installed() -> bool:
    """Looked up, not imported: that takes seconds."""
    return importlib.util.find_spec("transformer_engine") is not None


def _recipe(config: RLConfig) -> list[str]:
    name = config.quantization.rl_rollout_quantization
    if name == "none":
        if config.quantization.rl_quantization_skip:
            return ["--rl-quantization-skip without --rl-rollout-quantization has nothing to skip; leave it out"]
        return []
    try:
        recipe = get_recipe(name)
    except ConfigError as error:
        return [f"--rl-rollout-quantization: {line}" for line in error.problems]
    from megatron_rl.platform import current_platform  # brings torch, which wrong names need not wait for

    problem = recipe.device_problem(current_platform().compute_capability)
    problems = [] if problem is None else [f"--rl-rollout-quantization {name}: {problem}"]
    if config.model.num_layers is None or config.model.hidden_size is None:
        return problems  # the configuration's own rules say so
    return problems + _layers(config, recipe)


def _layers(config: RLConfig, recipe) -> list[str]:
    linears, patterns = quantizable_linears(config), config.quantization.rl_quantization_skip
    names = [linear.name for linear in linears]
    problems = [
        f"--rl-quantization-skip {pattern} matches no linear layer; they are named like {names[0]} or {names[-1]}, "
        "and first:N and last:N skip whole layers"
        for pattern in unmatched_patterns(patterns, names, config.model.num_layers)
    ]
    kept = [linear for linear in linears if not skipped(linear.name, patterns, config.model.num_layers)]
    if not kept:
        problems.append(
            f"--rl-quantization-skip {' '.join(patterns)} leaves no layer to quantise; use --rl-rollout-quantization "
            "none for unquantised rollouts"
        )
    parts = config.parallel.tensor_model_parallel_size
    for linear in kept:
        split = None if parts == 1 else "rows" if linear.splits_inputs else "columns"
        problem = recipe.shape_problem(linear.unit_rows, linear.columns, split)
        if problem is not None:
            problems.append(
                f"--rl-rollout-quantization {recipe.name} with --tensor-model-parallel-size {parts}: {linear.name}: "
                f"{problem}; use fp8 or int8, or another tensor-parallel size"
            )
            break  # the other layers have the same shapes
    return problems
