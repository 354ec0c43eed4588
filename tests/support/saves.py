"""A toy run that saves into a folder, in this process: every file of a checkpoint is a real one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint import manager
from megatron_rl.checkpoint.manager import CheckpointManager
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.platform.megatron import VERSION
from megatron_rl.run.training import TrainingRun
from megatron_rl.supervised import supervised_step
from tests.support.toy import toy_run

COMMON = () if VERSION >= (0, 19) else ("common.pt",)
"""What is no tensor: from 0.19 on among the tensors."""
SHARDS = ("__0_0.distcp",) if VERSION >= (0, 17) else ("__0_0.distcp", "__0_1.distcp")
FILES = (
    *COMMON, *SHARDS, ".metadata", "metadata.json", "state_rank_00000.safetensors",
    "run_state.json", "manifest.json",
)  # fmt: skip
"""Everything in a checkpoint of one rank, in the order in which it is written."""


def saving_run(config: RLConfig, groups: ParallelGroups, folder: Path, keep_last: int = 0) -> TrainingRun:
    """`Run.save` writes into ``folder``; close the rollouter at the end."""
    run = toy_run(config, groups)
    run.checkpoints = CheckpointManager(folder, keep_last, groups)
    return run


def train_a_step(run: TrainingRun) -> None:
    """One supervised step; its updates are counted, so that a save has an optimizer state."""
    result = supervised_step(run, run.progress.step + 1)
    run.progress.step += 1
    run.optimization.schedule.set_step(run.progress.step)
    run.progress.count_updates(result.applied_updates, result.skipped_updates)


def full_disk(folder: Path, file: str) -> None:
    """From now on ``file`` of a save that writes into ``folder`` lies on a full disk: the kernel says so.

    ``folder`` must be there already. It reaches the writers that are not Python too.
    """
    (folder / (".metadata.tmp" if file == ".metadata" else file)).symlink_to("/dev/full")


@contextlib.contextmanager
def before_tensors(then: Callable[[Path], None]) -> Iterator[None]:
    """In here every save calls ``then`` with its folder, before the first file is written there."""
    original = manager.save_tensors

    def save_tensors(folder: Path, *given: Any) -> Any:
        then(folder)
        return original(folder, *given)

    manager.save_tensors = save_tensors
    try:
        yield
    finally:
        manager.save_tensors = original
