"""When and what to save; how a run starts from what was saved."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import torch.distributed as dist

from megatron_rl.checkpoint.layout import (
    commit,
    find_checkpoint,
    list_checkpoints,
    remove_old,
    temporary_directory,
)
from megatron_rl.checkpoint.random_state import load_random_state, save_random_state
from megatron_rl.checkpoint.run_state import RunState, read_run_state, write_run_state
from megatron_rl.checkpoint.tensors import load_all, load_weights, save_tensors
from megatron_rl.models import PolicyModel
from megatron_rl.parallel import ParallelGroups
from megatron_rl.trainer import Optimization

logger = logging.getLogger(__name__)


class CheckpointManager:
    """Saves into one directory; every call is collective over the job."""

    def __init__(self, root: Path, keep_last: int, groups: ParallelGroups) -> None:
        self._root = root
        self._keep_last = keep_last
        self._groups = groups
        self._saved_step: int | None = None

    def save(self, state: RunState, policy: PolicyModel, optimization: Optimization) -> None:
        """Write and commit the checkpoint of ``state.step``, once."""
        if state.step == self._saved_step:
            return
        self._saved_step = state.step
        target = temporary_directory(self._root, state.step)
        if self._groups.is_main:
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
        dist.barrier()
        save_tensors(target, policy, optimization if state.has_optimizer else None)
        save_random_state(target, self._groups.rank)
        if self._groups.is_main:
            write_run_state(target, state)
        dist.barrier()
        if self._groups.is_main:
            committed = commit(self._root, state.step)
            remove_old(self._root, self._keep_last)
            logger.info("saved %s", committed)
        dist.barrier()

    def newest(self) -> Path | None:
        """The checkpoint to resume from, if this directory has one."""
        return find_checkpoint(self._root) if list_checkpoints(self._root) else None

    def find(self, path: str) -> Path:
        """The checkpoint a user means by ``path``."""
        return find_checkpoint(path)

    def start_from_weights(self, path: str, policy: PolicyModel) -> None:
        """`--pretrained-checkpoint` or `--load` with `--finetune`: weights only."""
        directory = find_checkpoint(path)
        load_weights(directory, policy)
        logger.info("weights from %s", directory)

    def resume(
        self,
        directory: Path,
        policy: PolicyModel,
        optimization: Optimization,
        with_optimizer: bool = True,
        with_random_state: bool = True,
    ) -> RunState:
        """Continue the run saved in ``directory``."""
        state = read_run_state(directory)
        if directory.parent == self._root:
            self._saved_step = state.step
        if state.has_optimizer and with_optimizer:
            load_all(directory, policy, optimization)
            optimization.scheduler.step(increment=state.updates)
        else:
            load_weights(directory, policy)
            optimization.optimizer.reload_model_params()
        if with_random_state and not load_random_state(directory, self._groups.rank):
            logger.info("rank %d is new to this run: its generators start from the seed", self._groups.rank)
        logger.info("resumed from %s (step %d)", directory, state.step)
        return state
