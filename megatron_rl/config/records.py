"""What a run reads at its start and writes on its way: checkpoints, metrics, logs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatron_rl.config.flags import Finding, flag

if TYPE_CHECKING:
    from megatron_rl.config.rl_config import RLConfig


def _run_dir(config: RLConfig, _: int) -> str | None:
    return config.checkpoint.save and str(Path(config.checkpoint.save) / "run")


def _run_name(config: RLConfig, _: int) -> str | None:
    run_dir, of_save = config.logging.run_dir, _run_dir(config, _)
    named = config.checkpoint.save if run_dir == of_save else run_dir
    return named and Path(named).name


def _in_run_dir(config: RLConfig, name: str) -> str | None:
    return config.logging.run_dir and str(Path(config.logging.run_dir) / name)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Loading and saving checkpoints."""

    save: str | None = flag(None, path=True, derived=lambda config, _: _in_run_dir(config, "checkpoints"))
    """Directory for this run's checkpoints. Default: checkpoints in --run-dir."""
    load: str | None = flag(None, path=True)
    """Directory of checkpoints to continue from, if this run has none of its own."""
    pretrained_checkpoint: str | None = flag(None, path=True, common=True)
    """Checkpoint, or directory of checkpoints, whose weights a new run starts from."""
    load_hf: str | None = flag(None, path=True, common=True)
    """Model to start from: a Hugging Face directory, a name on the hub (Qwen/Qwen2.5-0.5B-Instruct) or a GGUF file.
    Sets the model's shape too."""
    finetune: bool = flag(False)
    """Take only the weights from --load: fresh optimizer and random state, step 0."""
    save_interval: int | None = flag(None, ge=1, common=True)
    """Save every this many steps, e.g. 20. Default: only when the run stops."""
    ckpt_format: Literal["torch_dist", "torch"] = flag("torch_dist")
    """Checkpoint format to write: torch_dist. Megatron's older torch format can only be read, which needs no flag."""
    async_save: bool = flag(False)
    """Write periodic checkpoints in the background while training continues."""
    keep_best: str | None = flag(None)
    """Also save, and keep, the checkpoint with the highest value of this evaluation metric, e.g. val/gsm8k/pass@1."""
    no_load_optim: bool = flag(False)
    """Start with a fresh optimizer."""
    no_load_rng: bool = flag(False)
    """Start with a fresh random state."""
    no_save_optim: bool = flag(False)
    """Leave the optimizer out of checkpoints. They are smaller, but the run cannot be resumed exactly."""
    resume: bool = flag(False, common=True)
    """Resume from the newest valid checkpoint of this run, if there is one."""
    keep_last: int | None = flag(None, ge=1)
    """Keep only this many newest checkpoints, e.g. 3. Default: keep all."""


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Run directory, metrics, TensorBoard and wandb."""

    run_dir: str | None = flag(None, path=True, common=True, derived=_run_dir)
    """Directory for everything that this run writes. Default: run in the directory of --save."""
    tensorboard_dir: str | None = flag(None, path=True, derived=lambda config, _: _in_run_dir(config, "tensorboard"))
    """Directory of TensorBoard files. Default: tensorboard in --run-dir."""
    wandb_project: str | None = flag(None)
    """Weights & Biases project. Default: wandb is off."""
    wandb_entity: str | None = flag(None)
    """Team or user that the wandb run belongs to. Default: the account's own."""
    wandb_exp_name: str | None = flag(None, derived=_run_name)
    """Name of the wandb run. Default: the name of --run-dir, or of --save."""
    wandb_save_dir: str | None = flag(None, path=True, derived=lambda config, _: _in_run_dir(config, "wandb"))
    """Directory of wandb's files. Default: wandb in --run-dir."""
    wandb_mode: Literal["offline", "online", "disabled"] | None = flag(None)
    """Whether wandb talks to its server. Default: the environment variable WANDB_MODE, else online if there is an API
    key."""
    log_interval: int = flag(1, ge=1)
    """Log every this many steps (Megatron's default: 100)."""
    log_samples_interval: int = flag(10, ge=0)
    """Every this many steps, show a sample of the worst and of the best group in the terminal, TensorBoard and wandb; 0
    turns it off."""
    log_throughput: bool = flag(False)
    """Log model TFLOP/s per GPU."""
    log_straggler: bool = flag(False)
    """Log how much slower the slowest rank is."""
    log_params_norm: bool = flag(False)
    """Log the norm of all parameters."""
    log_num_zeros_in_grad: bool = flag(False)
    """Log how many gradient entries are exactly 0."""
    timing_log_level: int = flag(0, ge=0, le=2)
    """Above 0, timings synchronize with the device: exact, but slower."""
    rl_log_rollouts: int = flag(4, ge=0)
    """Groups per step, and tasks of each environment per evaluation, that are written to rollouts/*.jsonl."""
    callbacks: tuple[str, ...] = flag(())
    """Subclasses of megatron_rl.Callback that rank 0 calls after each step, e.g. mine.py:Target my_package:Stop."""


def names_several(path: str | None) -> bool:
    """Return whether it is a pattern, which the shell was kept from expanding."""
    return path is not None and "*" in path


def record_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Report what is wrong with where a run starts and writes."""
    checkpoint, evaluates = config.checkpoint, config.training.eval_interval is not None
    starts = checkpoint.load or checkpoint.pretrained_checkpoint or checkpoint.load_hf
    if config.training.eval_only and not starts:
        yield "eval_only", "without weights to evaluate; give --load DIR, --pretrained-checkpoint DIR or --load-hf DIR"
    if names_several(checkpoint.load) and not config.training.eval_only:
        yield "load", "names several checkpoints, which only --eval-only takes; name one of them"
    if checkpoint.load_hf is not None and checkpoint.pretrained_checkpoint is not None:
        yield "load_hf", (
            f"and --pretrained-checkpoint {checkpoint.pretrained_checkpoint} both say what to start from; keep one of "
            f"them; a checkpoint that does not know its shape takes --hf-config {checkpoint.load_hf}"
        )
    if config.logging.run_dir is None and not config.training.estimate:
        yield "run_dir", "is missing: metrics need a place; give --run-dir runs/NAME or --save DIR"
    if checkpoint.ckpt_format == "torch":
        yield "ckpt_format", "is read but not written: such a directory needs no flag; leave it out, or use torch_dist"
    if checkpoint.keep_best is not None and not checkpoint.keep_best.startswith("val/"):
        yield "keep_best", "is no metric of an evaluation; they are called val/ENVIRONMENT/MEASURE"
    if checkpoint.keep_best is not None and not evaluates:
        yield "keep_best", "needs evaluations; add --eval-interval"
