"""Flags to a frozen ``RLConfig``: parse, resolve, validate. No torch here.

    config, problems = read_config(sys.argv[1:], world_size)

does all three and finds every problem at once. A section's file declares its flags, how their
defaults follow from others, and the rules over them.
"""

from megatron_rl.config.arguments import read_config
from megatron_rl.config.model import ModelConfig, TokenizerConfig
from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.config.rl_config import RLConfig, difference_from_defaults, resolve, to_dict, typed_settings
from megatron_rl.config.rules import notes, validate

__all__ = [
    "ModelConfig", "ParallelConfig", "RLConfig", "TokenizerConfig", "difference_from_defaults", "notes", "read_config",
    "resolve", "to_dict", "typed_settings", "validate",
]  # fmt: skip
