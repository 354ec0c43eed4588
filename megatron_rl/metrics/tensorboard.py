"""TensorBoard event files."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from megatron_rl.errors import ConfigError


class TensorBoardWriter:
    """One scalar a metric. On resume, ``resume_step`` hides what an earlier process wrote after that step."""

    def __init__(self, directory: Path, *, resume_step: int | None = None) -> None:
        if find_spec("tensorboard") is None:
            problem = "TensorBoard output is on, but the package is not installed; pip install tensorboard"
            raise ConfigError([problem])
        # Here, not above: the import takes seconds and brings torch.
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if resume_step is None else resume_step + 1
        self._events = SummaryWriter(str(directory), purge_step=purge_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the scalars of one step."""
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._events.close()
