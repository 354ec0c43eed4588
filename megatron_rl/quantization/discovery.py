"""Finds recipes by their file: ``recipes/int8.py`` defines the recipe ``int8``. Nothing is registered."""

from __future__ import annotations

import difflib
import importlib

from megatron_rl.config.extensions import extension_names
from megatron_rl.config.quantization import RECIPES
from megatron_rl.errors import ConfigError
from megatron_rl.quantization import recipes
from megatron_rl.quantization.recipe import Recipe


def available_recipes() -> tuple[str, ...]:
    """Names of all recipes, sorted: those that the help lists."""
    return extension_names(*RECIPES)


def get_recipe(name: str) -> Recipe:
    """The recipe of that name; a dash stands for an underscore.

    Raises:
        ConfigError: there is none; the message names the nearest ones.
    """
    known, wanted = available_recipes(), name.replace("-", "_")
    if wanted not in known:
        near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "there is no similar name."
        raise ConfigError([f"there is no quantisation recipe '{name}': {hint} Available: {', '.join(known)}"])
    return importlib.import_module(f"{recipes.__name__}.{wanted}").RECIPE
