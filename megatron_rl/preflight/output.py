"""Where the run writes."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_rl.config import RLConfig
from megatron_rl.metrics.rundir import check_usable, writable
from megatron_rl.preflight.checkpoints import resumes


def output_problems(config: RLConfig) -> list[str]:
    """A run directory that cannot be made or is taken, and other directories that cannot be written."""
    if config.logging.run_dir is None:
        return []  # already reported as a missing flag
    run_dir = Path(config.logging.run_dir)
    problems = check_usable(run_dir, resume=resumes(config))
    if not problems:
        problems += _checkpoint_directory(config, run_dir)
    others = [("--save", config.checkpoint.save), ("--tensorboard-dir", config.logging.tensorboard_dir)]
    if config.logging.wandb_project is not None:
        others.append(("--wandb-save-dir", config.logging.wandb_save_dir))
    for flag, directory in others:
        if not Path(directory).is_relative_to(run_dir):
            problems += _unwritable(flag, Path(directory))
    return problems


def _checkpoint_directory(config: RLConfig, run_dir: Path) -> list[str]:
    """`--save` apart from the run directory may be another run's."""
    from megatron_rl.checkpoint import list_checkpoints

    save = Path(config.checkpoint.save)
    if resumes(config) or save == run_dir / "checkpoints" or not list_checkpoints(save):
        return []
    return [
        f"--save {save} already holds checkpoints, which this run would overwrite; continue them with --resume "
        "or choose another directory"
    ]


def _unwritable(flag: str, directory: Path) -> list[str]:
    if directory.resolve().parent == directory.resolve():
        return [f"{flag} {directory} is the root of the file system; name a directory for this run alone"]
    existing = directory
    while not os.path.exists(existing):  # Path.exists raises below an unsearchable directory
        existing = existing.parent
    if existing.is_dir() and writable(existing):
        return []
    what = "is not writable" if existing.is_dir() else "is a file"
    return [f"{flag} {directory}: {existing} {what}; choose another directory"]
