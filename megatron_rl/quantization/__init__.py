"""Quantised linear layers: one file per recipe in ``recipes/``, found by its name.

    recipe = get_recipe("int8")
    q = recipe.quantize(weight)            # [N, K] -> codes and scales
    y = recipe.matmul(x, q, bias)          # [..., K] -> [..., N]

This package imports torch only when a recipe is asked for: the configuration reads its torch-free parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_rl.quantization.recipe import Recipe

__all__ = ["available_recipes", "get_recipe"]


def available_recipes() -> tuple[str, ...]:
    """Names of all recipes, sorted: the files of ``recipes/``."""
    from megatron_rl.quantization import discovery

    return discovery.available_recipes()


def get_recipe(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        ConfigError: there is none; the message names the nearest ones.
    """
    from megatron_rl.quantization import discovery

    return discovery.get_recipe(name)
