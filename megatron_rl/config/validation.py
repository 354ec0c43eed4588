"""Every rule over the whole configuration, every broken one at once."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.resolve import resolve
from megatron_rl.config.rl_config import RLConfig, all_flags
from megatron_rl.config.rules import (
    batch,
    experts,
    parallel,
    quantization,
    required,
    rollout,
    training,
    transformer_engine,
)
from megatron_rl.config.values import refusal

WORLD_RULES = parallel.WORLD_RULES + batch.WORLD_RULES
_MODULES = (required, parallel, experts, batch, training, rollout, quantization, transformer_engine)
RULES = tuple(rule for module in _MODULES for rule in module.RULES)


def validate(config: RLConfig, world_size: int) -> list[str]:
    """One line for each problem (what, why, what instead); empty when the run may start.

    Files and devices are not looked at: whoever opens them checks them.
    """
    out_of_bounds = list(_bounds(config))
    if out_of_bounds:  # the other rules would divide by a size of 0
        return out_of_bounds
    config = resolve(config, world_size)
    problems = [line for rule in RULES for line in rule(config)]
    return problems + [line for rule in WORLD_RULES for line in rule(config, world_size)]


def _bounds(config: RLConfig) -> Iterator[str]:
    """Choices and bounds again, for configurations that were built in code and not parsed."""
    for flag in all_flags():
        value = getattr(getattr(config, flag.section), flag.name)
        if value is None or flag.many:
            continue
        problem = refusal(flag, value)
        if problem is not None:
            yield f"{flag.spelling} {problem}"
