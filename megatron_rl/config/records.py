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
    """Checkpoints in and out."""

    save: str | None = flag(None, path=True, derived=lambda config, _: _in_run_dir(config, "checkpoints"))
    """Directory of this run's checkpoints. Without it run-dir/checkpoints."""
    load: str | None = flag(None, path=True)
    """Directory of checkpoints whose run is continued, where this run has none of its own."""
    pretrained_checkpoint: str | None = flag(None, path=True, common=True)
    """Weights to start from where nothing is continued: a directory of checkpoints, or one of them."""
    load_hf: str | None = flag(None, path=True, common=True)
    """Hugging Face directory (config.json, *.safetensors), name on the hub or GGUF file to start from: sets the model's
    shape, and its weights where nothing is continued."""
    finetune: bool = flag(False)
    """Take only the weights from --load: no optimizer, no random state, step 0."""
    save_interval: int | None = flag(None, ge=1, common=True)
    """Save every this many steps; without it only when the run stops."""
    ckpt_format: Literal["torch_dist", "torch"] = flag("torch_dist")
    """Format that is written: torch_dist. Megatron's torch, one file a rank, is only read, without this flag."""
    async_save: bool = flag(False)
    """Write periodic checkpoints in the background while training goes on."""
    keep_best: str | None = flag(None)
    """Save whenever this metric of an evaluation is the highest so far, and keep that checkpoint: val/NAME/pass@1."""
    no_load_optim: bool = flag(False)
    """Start with a fresh optimizer."""
    no_load_rng: bool = flag(False)
    """Start with a fresh random state."""
    no_save_optim: bool = flag(False)
    """Leave the optimizer out of checkpoints: smaller, but the run cannot be continued exactly."""
    resume: bool = flag(False, common=True)
    """Continue from the newest valid checkpoint of this run, if there is one."""
    keep_last: int | None = flag(None, ge=1)
    """Delete all but this many newest checkpoints; without it keep all."""


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """The run directory, metric writers and what they report."""

    run_dir: str | None = flag(None, path=True, common=True, derived=_run_dir)
    """Directory of everything this run writes. Without it the folder run in --save."""
    tensorboard_dir: str | None = flag(None, path=True, derived=lambda config, _: _in_run_dir(config, "tensorboard"))
    """Directory of TensorBoard files. Without it run-dir/tensorboard."""
    wandb_project: str | None = flag(None)
    """Weights & Biases project; without it wandb is off."""
    wandb_entity: str | None = flag(None)
    """Team or user that the wandb run belongs to. Without it the account's own."""
    wandb_exp_name: str | None = flag(None, derived=_run_name)
    """Name of the wandb run. Without it the name of the run directory, or of --save."""
    wandb_save_dir: str | None = flag(None, path=True, derived=lambda config, _: _in_run_dir(config, "wandb"))
    """Directory of wandb's files. Without it run-dir/wandb."""
    wandb_mode: Literal["offline", "online", "disabled"] | None = flag(None)
    """Whether wandb talks to its server. Without it the environment variable WANDB_MODE, or else online where there is
    an API key."""
    log_interval: int = flag(1, ge=1)
    """Log every this many steps (Megatron's default: 100)."""
    log_samples_interval: int = flag(10, ge=0)
    """Show a sample of the worst and of the best group every this many steps, on the screen, in TensorBoard and wandb;
    0 is never."""
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


def names_several(path: str | None) -> bool:
    """Whether it is a pattern, which the shell was kept from expanding."""
    return path is not None and "*" in path


def record_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Where a run starts and writes."""
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
