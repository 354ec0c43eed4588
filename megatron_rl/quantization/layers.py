"""Whether a recipe can quantise the layers of a configuration: by shapes and names alone, no torch here."""

from __future__ import annotations

from collections.abc import Callable

from megatron_rl.config import RLConfig
from megatron_rl.quantization.names import skipped, unmatched_patterns
from megatron_rl.quantization.storage import Split

ShapeProblem = Callable[[int, int, Split | None], str | None]
"""(rows, columns, split) of a rank's part -> why it cannot be quantised like the whole, or None."""


def layer_problems(config: RLConfig, recipe: str, shape_problem: ShapeProblem) -> list[str]:
    """One line for every pattern that names nothing, and for layers that ``recipe`` cannot quantise."""
    linears, patterns = config.layout().linears, config.quantization.rl_quantization_skip
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
        split: Split | None = None if parts == 1 else "rows" if linear.kind == "row" else "columns"
        problem = shape_problem(linear.rows // linear.blocks, linear.columns, split)
        if problem is not None:
            problems.append(
                f"--rl-rollout-quantization {recipe} with --tensor-model-parallel-size {parts}: {linear.name}: "
                f"{problem}; use fp8 or int8, or another tensor-parallel size"
            )
            break  # the other layers have the same shapes
    return problems
