"""Names and settings of the algorithms."""

from __future__ import annotations

from collections.abc import Callable

from megatron_rl.config import RLConfig
from megatron_rl.errors import ConfigError


def algorithm_problems(config: RLConfig) -> list[str]:
    """Names that are not found, with the nearest ones, and settings that an algorithm refuses."""
    if not config.training.perform_rl_step:
        return []
    # imported here: it brings torch, which --help and wrong flags need not wait for
    from megatron_rl.algorithms import discovery
    from megatron_rl.algorithms.settings import advantage_config, correction_config, loss_config

    algorithm = config.algorithm
    checks: list[tuple[str, Callable[[], object]]] = [
        ("--rl-advantage", lambda: discovery.get("advantages", algorithm.rl_advantage)),
        ("--rl-policy-loss", lambda: discovery.get("losses", algorithm.rl_policy_loss)),
        ("--rl-correction", lambda: discovery.get("corrections", algorithm.rl_correction)),
        ("--rl-policy-loss", lambda: loss_config(config)),
        ("--rl-correction", lambda: correction_config(config)),
    ]
    if (algorithm.grpo_group_size or 0) > 1:  # else a rule has said so
        checks.append(("--rl-advantage", lambda: advantage_config(config)))
    problems = []
    for flag, check in checks:
        try:
            check()
        except ConfigError as error:
            problems += [f"{flag}: {line}" for line in error.problems]
    return problems
