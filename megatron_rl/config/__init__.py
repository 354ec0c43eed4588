"""Flags to a frozen ``RLConfig``: parse, resolve, validate. No torch here.

    config = load_config(sys.argv[1:], world_size)

does all three and raises one ``ConfigError`` with every problem found.
"""

from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.arguments import load_config, parse_config, read_config
from megatron_rl.config.checkpoint import CheckpointConfig
from megatron_rl.config.compatibility import CompatibilityConfig
from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.config.help import help_text
from megatron_rl.config.kernels import KernelConfig
from megatron_rl.config.logging import LoggingConfig
from megatron_rl.config.model import ModelConfig
from megatron_rl.config.optimizer import OptimizerConfig
from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.config.precision import PrecisionConfig
from megatron_rl.config.quantization import QuantizationConfig
from megatron_rl.config.report import config_hash, difference_from_defaults, notes, to_dict
from megatron_rl.config.resolve import resolve
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.config.schedule import ScheduleConfig
from megatron_rl.config.tokenizer import TokenizerConfig
from megatron_rl.config.training import TrainingConfig
from megatron_rl.config.validation import validate

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "CompatibilityConfig",
    "EnvironmentConfig",
    "KernelConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "QuantizationConfig",
    "RLConfig",
    "RolloutConfig",
    "ScheduleConfig",
    "TokenizerConfig",
    "TrainingConfig",
    "config_hash",
    "difference_from_defaults",
    "help_text",
    "load_config",
    "notes",
    "parse_config",
    "read_config",
    "resolve",
    "to_dict",
    "validate",
]
