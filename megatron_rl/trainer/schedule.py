"""The learning-rate schedule, from flags."""

from __future__ import annotations

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_rl.config import RLConfig


class Schedule:
    """The learning rate of each step: all updates of a step run at the same one.

    Counted in steps, it ends when the run does, however many updates a step makes. Of 4 warm-up steps to 1.0 the
    first runs at 0.25 and the fourth at 1.0. Megatron's own first step would run at `--lr-warmup-init`, 0 by
    default: a step without effect.
    """

    def __init__(self, optimizer: MegatronOptimizer, config: RLConfig) -> None:
        schedule, peak, warmup = config.schedule, config.optimizer.lr, config.lr_warmup_steps
        # Megatron's rate at step n is sqrt(warm-up / n), of the number itself and not of the part of the decay that is
        # over: the shift by one that keeps the first step from being lost would make it sqrt((warm-up - 1) / (n - 1)).
        self._first = 1 if schedule.lr_decay_style == "inverse-square-root" else 0
        after_one_step = schedule.lr_warmup_init + (peak - schedule.lr_warmup_init) / max(warmup, 1)
        self._megatron = OptimizerParamScheduler(
            optimizer,
            init_lr=schedule.lr_warmup_init if self._first else after_one_step,
            max_lr=peak,
            min_lr=schedule.min_lr,
            lr_warmup_steps=max(warmup - 1 + self._first, 0),
            lr_decay_steps=config.lr_decay_steps,
            lr_decay_style=schedule.lr_decay_style,
            start_wd=config.optimizer.weight_decay,
            end_wd=config.optimizer.weight_decay,
            wd_incr_steps=config.lr_decay_steps,
            wd_incr_style="constant",
            wsd_decay_steps=config.lr_wsd_decay_steps or None,
            lr_wsd_decay_style=schedule.lr_wsd_decay_style,
        )
        self.go_to(finished_steps=0)

    def go_to(self, finished_steps: int) -> None:
        """Set the rate of the step after ``finished_steps`` ones; it depends on nothing else."""
        self._megatron.num_steps = self._first + finished_steps
        self._megatron.step(increment=0)
