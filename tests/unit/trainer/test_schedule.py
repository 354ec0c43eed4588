"""The learning rate of every step, against numbers worked out by hand. The peak is 0.8."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.run.progress import Progress
from megatron_rl.run.training import record_updates
from megatron_rl.trainer.optimizer import Schedule, UpdateOutcome
from megatron_rl.trainer.update import TrainOutcome
from tests.support.samples import tiny_optimization
from tests.support.tiny import tiny_config

PEAK = 0.8


def rates(count: int, **changes: object) -> list[float]:
    """The rates the first ``count`` steps run at."""
    config = tiny_config(**{"lr": PEAK, "train_iters": count, **changes})
    optimizer = SimpleNamespace(param_groups=[{}])
    schedule = Schedule(optimizer, config)
    seen = [optimizer.param_groups[0]["lr"]]
    for finished in range(1, count):
        schedule.set_step(finished)
        seen.append(optimizer.param_groups[0]["lr"])
    return seen


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # Without warm-up: from the peak, an equal step down each; --min-lr 0 would come after the last one.
        ({"lr_decay_style": "linear"}, [0.8, 0.64, 0.48, 0.32, 0.16]),
        # The distance of 0.5 to --min-lr in five equal steps.
        ({"lr_decay_style": "linear", "min_lr": 0.3}, [0.8, 0.7, 0.6, 0.5, 0.4]),
        # Half, then all of the peak; then down over the remaining 5 - 1 = 4 steps after the peak.
        ({"lr_decay_style": "linear", "lr_warmup_iters": 2}, [0.4, 0.8, 0.6, 0.4, 0.2]),
        # From 0.2 a quarter of the way to 0.8 each.
        (
            {"lr_decay_style": "constant", "lr_warmup_iters": 4, "lr_warmup_init": 0.2},
            [0.35, 0.5, 0.65, 0.8, 0.8],
        ),
        ({"lr_decay_style": "constant", "lr_warmup_iters": 1}, [0.8, 0.8, 0.8, 0.8, 0.8]),
        # Half of the peak times one plus the cosine of 0, 30, 60, 90 and 120 degrees.
        ({"lr_decay_style": "cosine", "lr_decay_iters": 6}, [0.8, 0.746410, 0.6, 0.4, 0.2]),
        # Over after 2; from there on --min-lr.
        ({"lr_decay_style": "linear", "lr_decay_iters": 2, "min_lr": 0.2}, [0.8, 0.5, 0.2, 0.2, 0.2]),
        # Two steps of warm-up, then sqrt(2 / n) of the peak at step n, as Megatron has it: sqrt(2/3), sqrt(1/2) ...
        (
            {"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 2},
            [0.4, 0.8, 0.653197, 0.565685, 0.505964],
        ),
        # Without warm-up, and with one step of it, sqrt(1 / n); never below --min-lr.
        ({"lr_decay_style": "inverse-square-root"}, [0.8, 0.565685, 0.461880, 0.4, 0.357771]),
        (
            {"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 1, "min_lr": 0.45},
            [0.8, 0.565685, 0.461880, 0.45, 0.45],
        ),
        # From 0.2 a third of the way to 0.8 each, then sqrt(3 / n) of the peak.
        (
            {"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 3, "lr_warmup_init": 0.2},
            [0.4, 0.6, 0.8, 0.692820, 0.619677],
        ),
        # The last phase of 4 starts after step 1.
        (
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 4, "lr_wsd_decay_style": "linear"},
            [0.8, 0.8, 0.6, 0.4, 0.2],
        ),
        # 2 * 0.5 ** (i / 2) - 1 of the peak: 1, 0.414214, then 0.
        (
            {
                "lr_decay_style": "WSD",
                "lr_decay_iters": 4,
                "lr_wsd_decay_iters": 2,
                "lr_wsd_decay_style": "exponential",
                "lr_warmup_iters": 2,
            },
            [0.4, 0.8, 0.8, 0.331371, 0.0],
        ),
    ],
)
def test_rates(changes: dict[str, object], expected: list[float]) -> None:
    assert rates(5, **changes) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("style", ["linear", "cosine", "constant", "inverse-square-root"])
def test_no_step_is_without_effect(style: str) -> None:
    """Also in a run of one update, and with --min-lr 0."""
    for count in (1, 3):
        assert min(rates(count, lr_decay_style=style)) > 0
    assert min(rates(5, lr_decay_style=style, lr_warmup_iters=3)) > 0


def test_all_updates_of_a_step_run_at_its_rate_and_report_it(one_rank: ParallelGroups) -> None:
    """Of 4 steps; whatever was applied or skipped before, the rate of the fourth is a quarter of the peak."""
    optimization = tiny_optimization(lr=PEAK, train_iters=4, lr_decay_style="linear")
    assert [optimization.step().learning_rate for _ in range(3)] == pytest.approx([0.8, 0.8, 0.8])
    optimization.schedule.set_step(finished_steps=3)
    assert [optimization.step().learning_rate for _ in range(2)] == pytest.approx([0.2, 0.2])


def test_every_finished_step_moves_the_schedule_on_whatever_it_updated(one_rank: ParallelGroups) -> None:
    """Eight updates, none, one that was skipped: after three of four steps a quarter of the peak is left."""
    optimization = tiny_optimization(lr=PEAK, train_iters=4, lr_decay_style="linear")
    run = SimpleNamespace(
        progress=Progress(), optimization=optimization, critic=None, groups=one_rank, config=tiny_config()
    )
    rates = []
    applied, skipped = UpdateOutcome(True, 1.0, None, PEAK), UpdateOutcome(False, math.nan, None, PEAK)
    for outcomes in ([applied] * 8, [], [skipped]):
        record_updates(run, TrainOutcome({}, of_policy=outcomes))
        rates.append(optimization.step().learning_rate)
    assert rates == pytest.approx([0.6, 0.4, 0.2])


def test_optimizer_constants_reach_the_optimizer(one_rank: ParallelGroups) -> None:
    adam = tiny_optimization(adam_beta1=0.5, adam_beta2=0.6, adam_eps=1e-3, weight_decay=0.25)
    group = adam.optimizer.chained_optimizers[0].optimizer.param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.5, 0.6), 1e-3, 0.25)
    sgd = tiny_optimization(optimizer="sgd", sgd_momentum=0.3)
    assert sgd.optimizer.chained_optimizers[0].optimizer.param_groups[0]["momentum"] == 0.3
