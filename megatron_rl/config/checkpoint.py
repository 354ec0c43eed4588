"""What is loaded at the start and saved on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rl.config.fields import flag


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints in and out."""

    save: str | None = flag(None, path=True)
    """Directory of this run's checkpoints. Without it run-dir/checkpoints."""
    load: str | None = flag(None, path=True)
    """Directory of checkpoints whose run is continued, where this run has none of its own."""
    pretrained_checkpoint: str | None = flag(None, path=True, common=True)
    """Weights to start from where nothing is continued: a directory of checkpoints, or one of them."""
    load_hf: str | None = flag(None, path=True, common=True)
    """Hugging Face directory (config.json, *.safetensors) to start from: sets the model's shape, and its weights
    where nothing is continued."""
    finetune: bool = flag(False)
    """Take only the weights from --load: no optimizer, no random state, step 0."""
    save_interval: int | None = flag(None, ge=1, common=True)
    """Save every this many steps; without it only when the run stops."""
    ckpt_format: Literal["torch_dist", "torch"] = flag("torch_dist")
    """Format of checkpoints: torch is Megatron's one file a rank, for one topology; torch_dist suits any."""
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
    save_retain_interval: int | None = flag(None, note="--keep-last says how many checkpoints are kept")
    """Megatron's thinning of old checkpoints."""
