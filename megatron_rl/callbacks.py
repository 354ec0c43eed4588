"""What a run calls after each step: subclass `Callback`; docs/cli.md has an example.

Only rank 0 creates and calls callbacks; its decision to stop reaches the other ranks. A callback that raises is not
called again: the step is logged as it was before, the run saves, stops, and fails with an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class RunControl:
    """A callback's view of its run, through which it may ask the run to stop."""

    def __init__(self, run_dir: Path, total_steps: int) -> None:
        self.run_dir, self.total_steps = run_dir, total_steps
        self.stop_reason: str | None = None

    def stop(self, why: str = "by a callback") -> None:
        """Ask the run to stop after this step, with a checkpoint; ``why`` is logged."""
        self.stop_reason = why


class Callback:
    """Does nothing; a subclass overrides what it needs. What it changes in ``metrics``, or adds, is logged."""

    def on_rollouts(self, run: RunControl, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Look at all samples of an RL step after its update, as ``rollouts/step_N.jsonl`` has them; slow if many."""

    def on_evaluation(self, run: RunControl, step: int, metrics: dict[str, float]) -> None:
        """Look at the ``val/`` metrics of an evaluation; step 0 is before training. `--keep-best` has decided."""

    def on_step(self, run: RunControl, step: int, metrics: dict[str, float]) -> None:
        """Look at the metrics of a training step before they are logged and the step is saved."""
