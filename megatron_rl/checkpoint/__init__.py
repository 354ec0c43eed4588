"""Save, load and resume."""

import megatron_rl.platform  # noqa: F401  (prepares megatron-core before it is imported)
from megatron_rl.checkpoint.layout import find_checkpoint, holds_checkpoint, list_checkpoints
from megatron_rl.checkpoint.manager import CheckpointManager
from megatron_rl.checkpoint.run_state import (
    RunState,
    architecture_problems,
    continuation_problems,
    read_run_state,
    run_state_of,
)
from megatron_rl.checkpoint.state import RandomState, StateRegistry

__all__ = [
    "CheckpointManager",
    "RandomState",
    "RunState",
    "StateRegistry",
    "architecture_problems",
    "continuation_problems",
    "find_checkpoint",
    "holds_checkpoint",
    "list_checkpoints",
    "read_run_state",
    "run_state_of",
]
