"""From the command line to a checked configuration."""

from collections.abc import Sequence

from megatron_rl.config.arguments import read_flags
from megatron_rl.config.rl_config import RLConfig, resolve
from megatron_rl.config.rules import validate
from megatron_rl.errors import Problem


def read_config(argv: Sequence[str], world_size: int) -> tuple[RLConfig, list[Problem]]:
    """Parse, resolve and validate: the configuration and every problem of all three, to which a caller adds its own.

    With problems the configuration holds what could be read and is good for looking up paths and names.
    ``--help`` and ``--help-all`` write the help and exit.
    """
    reading = read_flags(argv)
    config = resolve(reading.config, world_size)
    if reading.file_is_lost:  # what it would have set is not missing
        return config, reading.problems
    broken = validate(config, world_size)  # without what only repeats that a value could not be read
    return config, [*reading.problems, *(problem for problem in broken if problem.flag not in reading.failed)]
