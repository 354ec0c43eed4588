"""The learning-rate schedule, from flags."""

from __future__ import annotations

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_rl.config import RLConfig


def build_schedule(optimizer: MegatronOptimizer, config: RLConfig) -> OptimizerParamScheduler:
    """The learning-rate schedule, counted in optimizer updates (Megatron's ``iters``).

    Of 4 warm-up updates to 1.0 the first runs at 0.25 and the fourth at 1.0. Megatron's own first
    update would run at `--lr-warmup-init`, 0 by default: an update without effect.
    """
    schedule, peak, warmup = config.schedule, config.optimizer.lr, config.lr_warmup_updates
    first = schedule.lr_warmup_init + (peak - schedule.lr_warmup_init) / max(warmup, 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=first,
        max_lr=peak,
        min_lr=schedule.min_lr,
        lr_warmup_steps=max(warmup - 1, 0),  # after the first one
        lr_decay_steps=config.lr_decay_updates,
        lr_decay_style=schedule.lr_decay_style,
        start_wd=config.optimizer.weight_decay,
        end_wd=config.optimizer.weight_decay,
        wd_incr_steps=config.lr_decay_updates,
        wd_incr_style="constant",
        wsd_decay_steps=config.lr_wsd_decay_updates or None,
        lr_wsd_decay_style=schedule.lr_wsd_decay_style,
    )
