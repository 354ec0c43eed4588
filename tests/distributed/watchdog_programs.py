"""Stages that wait for each other, and what each one's watchdog says; run on every rank by `test_watchdog.py`."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.algorithms import TokenBatch
from megatron_rl.metrics.timers import PhaseTimer
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import initialize, shut_down
from megatron_rl.trainer.batches import BatchBuilder
from megatron_rl.trainer.optimizer import Optimization
from megatron_rl.trainer.scoring import Scorer
from megatron_rl.trainer.supervised import SupervisedTrainer
from megatron_rl.watchdog import Watchdog
from tests.distributed.layout_programs import configured
from tests.support.samples import random_samples
from tests.support.tiny import single_thread, tiny_policy

LIMIT_S = 2.0


def hang(folder: str, hung: int) -> str:
    """What this rank's watchdog says of an update in which stage ``hung`` hangs until both watchdogs have spoken."""
    single_thread()
    config = configured({"pipeline_model_parallel_size": 2}, {})
    groups = initialize(config.parallel, current_platform())
    rank = groups.rank
    told = [Path(folder) / f"told.{each}" for each in range(2)]
    optimization = Optimization(tiny_policy(config), config)
    scorer = (_Hanging if rank == hung else Scorer)(optimization.policy, groups, 1.0)
    trainer = SupervisedTrainer(optimization, scorer, PhaseTimer())
    batches = BatchBuilder(48, 1, optimization.policy.device, groups, config.stages).pack(random_samples(20), seed=1)
    threading.Thread(target=_release, args=(told,), daemon=True).start()

    def end(what: str) -> None:
        if not told[rank].exists():
            told[rank].write_text(what)

    with Watchdog(LIMIT_S, lambda: 0, end).watching():
        trainer.step(batches)
    shut_down()
    return told[rank].read_text()


def timeouts(stages: int) -> dict[str, float]:
    """Minutes after which a collective of each group fails by itself, of a run with a limit of 10."""
    config = configured({"pipeline_model_parallel_size": stages}, {})
    groups = initialize(config.parallel, current_platform())
    found = {name: group for name, group in vars(groups).items() if isinstance(group, dist.ProcessGroup)}
    minutes = {name: _timeout(group).total_seconds() / 60 for name, group in found.items()}
    shut_down()
    return minutes


def _timeout(group: dist.ProcessGroup) -> datetime.timedelta:
    return group._get_backend(group._device_types[0]).options._timeout


_RELEASED = threading.Event()


def _release(told: Sequence[Path]) -> None:
    while not all(path.exists() for path in told):
        time.sleep(0.05)
    _RELEASED.set()


class _Hanging(Scorer):
    passes = 0

    def forward(self, model: torch.nn.Module, batch: TokenBatch) -> torch.Tensor:
        self.passes += 1
        if self.passes == 2:
            _RELEASED.wait()
        return super().forward(model, batch)
