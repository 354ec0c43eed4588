"""Where metrics go: one protocol, and the log that fans a step out to every writer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from megatron_rl.errors import TrainingError

logger = logging.getLogger(__name__)


class MetricWriter(Protocol):
    """Receives the metrics of each step, in step order."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one step."""

    def close(self) -> None:
        """Flush and release; called once."""


class MetricLog:
    """Hands each step to the record (``metrics.jsonl``) and then to the displays.

    A display that raises is dropped with one warning: a full TensorBoard disk must not end a training run.
    The record is what resume and the report read, so losing it is an error. On ranks that report nothing,
    ``MetricLog()`` takes the calls and does nothing.
    """

    def __init__(self, record: MetricWriter | None = None, displays: Sequence[MetricWriter] = ()) -> None:
        self._record = record
        self._displays = list(displays)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step everywhere. Call it once a step, evaluation metrics included."""
        if self._record is not None:
            try:
                self._record.write(step, metrics)
            except OSError as error:
                raise _record_lost(error) from error
        for display in tuple(self._displays):
            try:
                display.write(step, metrics)
            except Exception as error:  # noqa: BLE001  (any display may fail in any way; none may stop training)
                self._displays.remove(display)
                logger.warning("%s is off from step %d on: %s", type(display).__name__, step, _reason(error))

    def close(self) -> None:
        """Close every writer, the record first."""
        displays, self._displays = self._displays, []
        if self._record is not None:
            try:
                self._record.close()
            except OSError as error:
                raise _record_lost(error) from error
        for display in displays:
            try:
                display.close()
            except Exception as error:  # noqa: BLE001  (as in write)
                logger.warning("%s did not close cleanly: %s", type(display).__name__, _reason(error))


def _record_lost(error: OSError) -> TrainingError:
    return TrainingError(
        f"the metrics of this step could not be recorded: {error}; resume and the report need every step, "
        "so training stops here; free the disk or repair the mount and resume from the last checkpoint"
    )


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
