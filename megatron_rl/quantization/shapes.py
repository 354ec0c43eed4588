"""Which weights can be quantised, and their bytes, from names and shapes. No torch, for the memory estimate."""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Callable, Iterator, Sequence, Set
from typing import TYPE_CHECKING, ClassVar, Literal

from megatron_rl.errors import ConfigError, Problem
from megatron_rl.registry import RECIPES

if TYPE_CHECKING:
    from megatron_rl.config.rl_config import RLConfig

Split = Literal["columns", "rows"]
"""Split of a weight over tensor-parallel ranks: outputs (``ColumnParallelLinear``), or inputs (``RowParallelLinear``),
whose products are partial sums.
"""
_NUMBER = re.compile(r"(?<=\.local_experts\.)\d+")
"""Expert number."""
_EDGE = re.compile(r"(first|last):(\d+)")


class Storage:
    """Storage of a weight [rows, columns]: codes, padded to whole tiles, and scales.

    The constants must be literals: `storage_of` reads those of built-in recipes from their source. A recipe with
    another layout overrides `stored_bytes`.
    """

    bits: ClassVar[int] = 8
    """Bits per code."""
    scale_bytes: ClassVar[int] = 4
    tile: ClassVar[tuple[int, int]] = (1, 0)
    """Rows and columns that share a scale; 0 columns: the whole row. Example: NVFP4 (1, 16)."""
    needs_calibration: ClassVar[bool] = False
    """Whether it needs the maximum of each input channel; stores one fp32 number per channel."""

    def stored_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of the codes, rounded up to multiples of 16 and of the tile."""
        height, width = (max(16, size) for size in self.tile)
        return -(-rows // height) * height, -(-columns // width) * width

    def stored_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of codes, scales and smoothing."""
        stored_rows, stored_columns = self.stored_shape(rows, columns)
        height, width = self.tile
        scales = stored_rows // height * (stored_columns // width if width else 1)
        smoothing = 4 * columns if self.needs_calibration else 0
        return stored_rows * stored_columns * self.bits // 8 + scales * self.scale_bytes + smoothing

    def shape_problem(self, rows: int, columns: int, split: Split | None) -> str | None:
        """Return why a rank's part [rows, columns] of a weight cannot be quantised like the whole; None if it can."""
        size, tile = (columns, self.tile[1]) if split == "rows" else (rows, self.tile[0])
        if split is not None and tile and size % tile:
            return f"a rank's part of {size} is no multiple of {tile}, so its tiles would not be those of one rank"
        return None


def storage_of(name: str) -> Storage | None:
    """Return a recipe's storage, None for ``none``; imports torch only for recipes given by path."""
    if ":" in name or name == "none":
        recipe = RECIPES.get(name)
        if recipe is not None and not isinstance(recipe, Storage):
            kind = "a class" if isinstance(recipe, type) else type(recipe).__name__
            raise ConfigError([f"quantisation recipe {name} is {kind}; name an instance: RECIPE = YourRecipe()"])
        return recipe
    storage = Storage()
    stated = {constant: RECIPES.stated(name, constant) for constant in Storage.__annotations__}
    vars(storage).update({constant: value for constant, value in stated.items() if value is not None})
    return storage


def skipped(name: str, patterns: Sequence[str], num_layers: int) -> bool:
    """Return whether a pattern matches the layer: a shell pattern (``layers.0.*``), or ``first:N`` or ``last:N``."""
    return any(_matches(name, pattern, num_layers) for pattern in patterns)


def _matches(name: str, pattern: str, num_layers: int) -> bool:
    edge = _EDGE.fullmatch(pattern)
    if edge is None:
        return fnmatch.fnmatchcase(name, pattern)
    index, count = int(name.split(".")[1]), int(edge[2])
    return index < count if edge[1] == "first" else index >= num_layers - count


def layer_problems(config: RLConfig, shape_problem: Callable[[int, int, Split | None], str | None]) -> list[Problem]:
    """Report patterns without a match, and layers that the recipe cannot quantise.

    ``shape_problem``: (rows, columns, split) of a rank's part -> why it cannot be quantised like the whole, or None.
    """
    places = itertools.product(range(config.stages.count), range(config.parallel.expert_model_parallel_size))
    linears = [linear for place in places for linear in config.layout(1, *place).linears]
    patterns, num_layers = config.quantization.rl_quantization_skip, config.model.num_layers
    names = [linear.name for linear in linears]
    skip = "--rl-quantization-skip"
    problems = [
        Problem(
            skip,
            f"{skip} {pattern} matches no linear layer; they are named like {names[0]} or {names[-1]}, and first:N and "
            "last:N skip whole layers",
        )
        for pattern in patterns
        if not any(_matches(name, pattern, num_layers) for name in names)
    ]
    kept = [linear for linear in linears if not skipped(linear.name, patterns, num_layers)]
    if not kept:
        text = "leaves no layer to quantise; use --rl-rollout-quantization none for unquantised rollouts"
        problems.append(config.problem("rl_quantization_skip", text))
    if config.model.moe_grouped_gemm:
        quantised = {linear.name for linear in kept}
        problems += [config.problem("rl_quantization_skip", text) for text in _cut_stacks(names, quantised)]
    for linear in kept:
        split: Split | None = None if linear.ranks == 1 else "rows" if linear.kind == "row" else "columns"
        problem = shape_problem(linear.rows // linear.blocks, linear.columns, split)
        if problem is not None:
            flag = f"--tensor-model-parallel-size {config.parallel.tensor_model_parallel_size}"
            text = f"with {flag}: {linear.name}: {problem}; use fp8 or int8, or another tensor-parallel size"
            problems.append(config.problem("rl_rollout_quantization", text))
            break  # the other layers have the same shapes
    return problems


def _cut_stacks(names: Sequence[str], quantised: Set[str]) -> Iterator[str]:
    """Report the first expert that is skipped while others of its stack are quantised."""
    stacks = {_NUMBER.sub("*", name) for name in quantised}
    for name in names:
        stack = _NUMBER.sub("*", name)
        if name not in quantised and stack in stacks:
            yield (
                f"leaves {name} as it is and other experts of the layer not: with --moe-grouped-gemm they are one "
                f"product; skip {stack}, or use --no-moe-grouped-gemm"
            )
            return
