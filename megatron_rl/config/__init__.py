"""Flags to a frozen ``RLConfig``: parse, resolve, validate. No torch here.

    config, problems = read_config(sys.argv[1:], world_size)

does all three and finds every problem at once. A section's file declares its flags, how their
defaults follow from others, and the rules over them.
"""

from collections.abc import Sequence

from megatron_rl.config.arguments import read_flags
from megatron_rl.config.model import ModelConfig, TokenizerConfig
from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.config.rl_config import RLConfig, difference_from_defaults, resolve, to_dict, typed_settings
from megatron_rl.config.rules import notes, validate
from megatron_rl.errors import Problem

__all__ = [
    "ModelConfig", "ParallelConfig", "RLConfig", "TokenizerConfig", "difference_from_defaults", "notes", "read_config",
    "resolve", "to_dict", "typed_settings", "validate",
]  # fmt: skip


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
