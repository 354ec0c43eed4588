"""Names and settings of the algorithms."""

from __future__ import annotations

from collections.abc import Callable

from megatron_rl.config import RLConfig
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.errors import ConfigError
from megatron_rl.registry import ADVANTAGES, LOSSES


def algorithm_problems(config: RLConfig) -> list[str]:
    """Names that are not found, with the nearest ones, and settings that an algorithm refuses."""
    if not config.training.perform_rl_step:
        return []
    # imported here: it brings torch, which --help and wrong flags need not wait for
    from megatron_rl.algorithms.settings import correction_config, loss_config

    algorithm = config.algorithm
    checks: list[tuple[str, Callable[[], object]]] = [
        ("--rl-advantage", lambda: ADVANTAGES.module(algorithm.rl_advantage)),
        ("--rl-policy-loss", lambda: LOSSES.get(algorithm.rl_policy_loss)),
        ("--rl-correction", lambda: _check_correction(algorithm)),
        ("--rl-policy-loss", lambda: loss_config(config)),
        ("--rl-correction", lambda: correction_config(config)),
    ]
    problems = []
    for flag, check in checks:
        try:
            check()
        except ConfigError as error:
            problems += [f"{flag}: {line}" for line in error.lines]
    return problems


def _check_correction(algorithm: AlgorithmConfig) -> None:
    """Raises ``ConfigError`` for an unknown name, and for bounds that the correction does not read."""
    from megatron_rl.algorithms.corrections.composition import correction_modules  # here for the reason above

    modules = correction_modules(algorithm.rl_correction)
    bounds = {
        "--rl-correction-lower": algorithm.rl_correction_lower,
        "--rl-correction-upper": algorithm.rl_correction_upper,
    }
    given = [flag for flag, value in bounds.items() if value is not None]
    if given and not any("DEFAULT_BOUNDS" in vars(module) for module in modules):
        raise ConfigError(
            [
                f"{algorithm.rl_correction} has no bounds and would ignore {' and '.join(given)}; use masked_is or "
                "geometric, or leave the bounds out"
            ]
        )
