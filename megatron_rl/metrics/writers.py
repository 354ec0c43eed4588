"""Where metrics go: one protocol, the log that fans a step out, and the displays: TensorBoard, Weights & Biases."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol

from megatron_rl.errors import ConfigError, TrainingError

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 90.0


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


class BackgroundWriter:
    """Opens and feeds a slow writer from a daemon thread, over a bounded queue that drops when full.

    Opening may hang for ever (a login prompt, a proxy that swallows packets): after ``open_timeout_s`` the
    writer is given up with one warning. Being a daemon, the thread does not hold the process at exit.
    """

    def __init__(
        self,
        name: str,
        open_writer: Callable[[], MetricWriter],
        *,
        queue_size: int = 1000,
        open_timeout_s: float = OPEN_TIMEOUT_S,
        close_timeout_s: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.dropped = 0
        """Rows that did not fit in the queue."""
        self._open_writer = open_writer
        self._open_timeout_s = open_timeout_s
        self._close_timeout_s = close_timeout_s
        self._clock = clock
        self._started = clock()
        self._rows: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(queue_size)
        self._opened = threading.Event()
        self._off = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"metrics-{name}", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue one step; returns at once."""
        if self._off.is_set() or self._gave_up_opening():
            return
        try:
            self._rows.put_nowait((step, dict(metrics)))
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                logger.warning("%s cannot keep up; dropping rows from step %d on", self.name, step)

    def close(self) -> None:
        """Let the queue drain for at most ``close_timeout_s``, then leave the thread behind."""
        if not self._off.is_set():
            deadline = self._clock() + self._close_timeout_s
            try:
                self._rows.put(None, timeout=self._close_timeout_s)
            except queue.Full:
                self._off.set()
            self._thread.join(max(0.0, deadline - self._clock()))
            if self._thread.is_alive():
                self._off.set()
                logger.warning("%s did not finish in %.0f s; left behind", self.name, self._close_timeout_s)
        if self.dropped:
            logger.warning("%s dropped %d steps; metrics.jsonl has them all", self.name, self.dropped)

    def _gave_up_opening(self) -> bool:
        if self._opened.is_set() or self._clock() - self._started < self._open_timeout_s:
            return False
        self._off.set()
        logger.warning("%s did not start in %.0f s and is off", self.name, self._open_timeout_s)
        return True

    def _run(self) -> None:
        """The thread: any failure switches this writer off, with one warning."""
        try:
            writer = self._open_writer()
            self._opened.set()
            while not self._off.is_set():
                row = self._rows.get()
                if row is None:
                    break
                writer.write(*row)
            writer.close()
        except Exception as error:  # noqa: BLE001  (a third-party client may raise anything)
            if not self._off.is_set():
                logger.warning("%s is off: %s: %s", self.name, type(error).__name__, error)
            self._off.set()


Mode = Literal["offline", "online", "disabled"]


def wandb_mode(asked: Mode | None) -> str:
    """``asked``, or else what the environment variable ``WANDB_MODE`` says, or else offline."""
    return asked or os.environ.get("WANDB_MODE") or "offline"


def open_wandb(
    project: str,
    name: str,
    directory: Path,
    config: Mapping[str, object],
    mode: Mode | None = None,
    *,
    open_timeout_s: float = OPEN_TIMEOUT_S,
) -> BackgroundWriter | None:
    """A writer that returns at once, whether wandb is missing, hangs, fails or works; None where it is disabled."""
    told = wandb_mode(mode)
    if told == "disabled":
        return None
    return BackgroundWriter(
        "wandb",
        lambda: _WandbWriter(project, name, directory, config, told, open_timeout_s),
        open_timeout_s=open_timeout_s,
    )


class _WandbWriter:
    """The blocking client; lives in the background writer's thread."""

    def __init__(
        self, project: str, name: str, directory: Path, config: Mapping[str, object], mode: str, timeout_s: float
    ) -> None:
        import wandb

        directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=project,
            name=name,
            dir=str(directory),
            config=dict(config),
            mode=mode,
            # Console capture would wrap the stream the progress bar writes to.
            settings=wandb.Settings(console="off", silent=True, init_timeout=timeout_s),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
