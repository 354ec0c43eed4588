"""Saves that fail on one rank; run on every rank by the distributed tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.layout import find_checkpoint
from megatron_rl.errors import SaveError
from megatron_rl.platform.groups import shut_down
from tests.distributed.programs import join, toy_config
from tests.support.saves import before_tensors, full_disk, saving_run, train_a_step


def fail_on_one_rank(folder: str, files: Sequence[str], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The message of a save for each of ``files`` whose disk is full, and what the folder then holds.

    Rank 1's own files fail there alone, the others on rank 0 alone. After each the same step is tried again.
    """
    groups = join(tensor_size=2)
    run = saving_run(toy_config(groups, changes), groups, Path(folder))
    train_a_step(run)
    run.save(final=True)
    reports = {}
    for file in files:
        train_a_step(run)
        owner = 1 if file.startswith("__1_") else 0
        plant = full_disk if groups.rank == owner else _ignore
        with before_tensors(partial(plant, file=file)):
            try:
                run.save(final=True)
                message = None
            except SaveError as error:
                message = str(error)
        found = find_checkpoint(folder).name
        run.save(final=True)
        reports[file] = [message, found, find_checkpoint(folder).name]
    reports["failed_saves"] = run.checkpoints.failed_saves
    run.closing.close()
    shut_down()
    return reports


def _ignore(folder: Path, file: str) -> None:
    """The file is the other rank's."""
