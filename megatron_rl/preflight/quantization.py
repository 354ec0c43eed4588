"""Recipes, the device and the layers' shapes, before there is a model."""

from __future__ import annotations

import importlib.util

from megatron_rl.config import RLConfig
from megatron_rl.errors import ConfigError
from megatron_rl.quantization.layers import layer_problems
from megatron_rl.registry import RECIPES


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
        return []
    try:
        recipe = RECIPES.get(name)
    except ConfigError as error:
        return [f"--rl-rollout-quantization: {line}" for line in error.lines]
    from megatron_rl.platform import current_platform  # brings torch, which wrong names need not wait for

    problem = recipe.device_problem(current_platform().compute_capability)
    problems = [] if problem is None else [f"--rl-rollout-quantization {name}: {problem}"]
    if not config.model.is_complete:
        return problems  # the configuration's own rules say so
    return problems + layer_problems(config, recipe.name, recipe.shape_problem)
