"""What is written down, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rl.config.fields import flag


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """The run directory, metric writers and what they report."""

    run_dir: str | None = flag(None, path=True, common=True)
    """Directory of everything this run writes. Without it --save."""
    tensorboard_dir: str | None = flag(None, path=True)
    """Directory of TensorBoard files. Without it run-dir/tensorboard."""
    wandb_project: str | None = flag(None)
    """Weights & Biases project; without it wandb is off."""
    wandb_exp_name: str | None = flag(None)
    """Name of the wandb run. Without it the name of the run directory."""
    wandb_save_dir: str | None = flag(None, path=True)
    """Directory of wandb's files. Without it run-dir/wandb."""
    wandb_mode: Literal["offline", "online", "disabled"] | None = flag(None)
    """Whether wandb talks to its server. Without it the environment variable WANDB_MODE, or else offline."""
    log_interval: int = flag(1, ge=1)
    """Log every this many steps (Megatron's default: 100)."""
    log_throughput: bool = flag(False)
    """Log model TFLOP/s a GPU."""
    log_straggler: bool = flag(False)
    """Log how far the slowest rank is behind."""
    log_params_norm: bool = flag(False)
    """Log the norm of all parameters."""
    log_num_zeros_in_grad: bool = flag(False)
    """Log how many gradient entries are exactly 0."""
    timing_log_level: int = flag(0, ge=0, le=2)
    """Above 0 every stage's time waits for the device: exact, at the price of a stall."""
    rl_log_rollouts: int = flag(4, ge=0)
    """Groups a step, and tasks of each environment an evaluation, written to rollouts/*.jsonl."""
    log_timers_to_tensorboard: bool = flag(False, note="the seconds of every stage are always among the metrics")
    """Megatron's switch for timers in TensorBoard."""
    log_progress: bool = flag(False, note="metrics.jsonl records time, tokens and FLOPs of every step")
    """Megatron's progress file."""
    log_memory_to_tensorboard: bool = flag(False, note="memory figures are always among the metrics")
    """Megatron's switch for memory figures."""
    tensorboard_log_interval: int = flag(1, note="TensorBoard gets every step that --log-interval logs")
    """Megatron's second logging interval."""
    timing_log_option: Literal["max", "minmax", "all"] = flag(
        "minmax", note="timers report the minimum and maximum over ranks"
    )
    """Megatron's choice of what timers report."""
    straggler_minmax_count: int = flag(1, note="--log-straggler reports the slowest and the fastest rank")
    """Megatron's number of ranks in the straggler report."""
    disable_straggler_on_startup: bool = flag(False, note="--log-straggler is on from the first step")
    """Megatron's delayed start of the straggler report."""
