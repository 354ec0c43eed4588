"""Weights & Biases: offline unless told otherwise, and never in the way of training."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatron_rl.metrics.background import BackgroundWriter

OPEN_TIMEOUT_S = 90.0
Mode = Literal["offline", "online", "disabled"]


def wandb_mode(asked: Mode | None) -> str:
    """``asked``, or else what the environment variable ``WANDB_MODE`` says, or else offline."""
    return asked or os.environ.get("WANDB_MODE") or "offline"


@dataclass(frozen=True)
class WandbRun:
    """What identifies a run."""

    project: str
    name: str
    directory: Path
    config: Mapping[str, object] = field(default_factory=dict)
    mode: Mode | None = None
    """See ``wandb_mode``."""
    run_id: str | None = None
    """Stable over resumes, so that the rows of a resumed run join the first ones."""


def open_wandb(run: WandbRun, *, open_timeout_s: float = OPEN_TIMEOUT_S) -> BackgroundWriter | None:
    """A writer that returns at once, whether wandb is missing, hangs, fails or works; None where it is disabled."""
    if wandb_mode(run.mode) == "disabled":
        return None
    return BackgroundWriter("wandb", lambda: _WandbWriter(run, open_timeout_s), open_timeout_s=open_timeout_s)


class _WandbWriter:
    """The blocking client; lives in the background writer's thread."""

    def __init__(self, run: WandbRun, open_timeout_s: float) -> None:
        import wandb

        run.directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.run_id,
            resume=None if run.run_id is None else "allow",
            dir=str(run.directory),
            config=dict(run.config),
            mode=wandb_mode(run.mode),
            # Console capture would wrap the stream the progress bar writes to.
            settings=wandb.Settings(console="off", silent=True, init_timeout=open_timeout_s),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
