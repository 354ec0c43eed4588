"""What a command line says, before anything is derived from it."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.config.arguments import read_flags
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import ConfigError


def parse_config(argv: Sequence[str]) -> RLConfig:
    """Raises ``ConfigError`` with every unknown flag, wrong type, wrong choice and value out of bounds."""
    reading = read_flags(argv)
    if reading.problems:
        raise ConfigError(reading.problems)
    return reading.config
