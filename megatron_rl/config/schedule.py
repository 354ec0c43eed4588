"""The learning rate over the run: counted in steps with --train-iters, in samples with --train-samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rl.config.fields import flag


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Warm-up and decay of the learning rate, which all updates of a step share."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag("linear")
    """Shape of the decay from --lr to --min-lr."""
    min_lr: float = flag(0.0, ge=0)
    """Learning rate at the end of the decay."""
    lr_warmup_iters: int = flag(0, ge=0)
    """Steps of linear warm-up."""
    lr_warmup_samples: int = flag(0, ge=0)
    """Samples of linear warm-up."""
    lr_warmup_fraction: float | None = flag(None, ge=0, lt=1)
    """Warm-up as a share of the decay, instead of the two flags above."""
    lr_warmup_init: float = flag(0.0, ge=0)
    """Learning rate at the start of the warm-up."""
    lr_decay_iters: int | None = flag(None, ge=1)
    """Steps after which --min-lr is reached. Without it --train-iters."""
    lr_decay_samples: int | None = flag(None, ge=1)
    """Samples after which --min-lr is reached. Without it --train-samples."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag("exponential")
    """Shape of the last phase of WSD."""
    lr_wsd_decay_iters: int | None = flag(None, ge=1)
    """Steps of the last phase of WSD."""
    lr_wsd_decay_samples: int | None = flag(None, ge=1)
    """Samples of the last phase of WSD."""
