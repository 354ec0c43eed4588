"""Where metrics go: the log that fans a step out, and the displays: TensorBoard, Weights & Biases."""

from __future__ import annotations

import logging
import netrc
import os
import queue
import textwrap
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol
from urllib.parse import urlsplit

from megatron_rl.errors import ConfigError, TrainingError
from megatron_rl.metrics.rollouts import TextSample

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 90.0
CLOSE_TIMEOUT_S = 15.0


class MetricWriter(Protocol):
    """Receives the metrics of each step, in step order."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one step."""

    def close(self) -> None:
        """Flush and release; called once."""


class Display(MetricWriter, Protocol):
    """Shows samples, too."""

    def write_samples(self, step: int, samples: Sequence[TextSample]) -> None:
        """Take samples of the step, whose metrics may have been written before."""


class MetricLog:
    """Hands each step to the record (``metrics.jsonl``) and then to the displays.

    A display that raises is dropped with one warning. Resume and the report read the record, so losing it is an error.
    ``MetricLog()``, of ranks that report nothing, does nothing.
    """

    def __init__(self, record: MetricWriter | None = None, displays: Sequence[Display] = ()) -> None:
        self._record = record
        self._displays = list(displays)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step everywhere. Call it once a step, evaluation metrics included."""
        if self._record is not None:
            try:
                self._record.write(step, metrics)
            except OSError as error:
                raise TrainingError(
                    f"the metrics of step {step} could not be recorded: {error}; training stops, as resume and the "
                    "report need every step; free the disk or repair the mount and resume from the last checkpoint"
                ) from error
        self._show(step, lambda display: display.write(step, metrics))

    def write_samples(self, step: int, samples: Sequence[TextSample]) -> None:
        """Show samples of a step everywhere."""
        self._show(step, lambda display: display.write_samples(step, samples))

    def _show(self, step: int, show: Callable[[Display], None]) -> None:
        for display in tuple(self._displays):
            try:
                show(display)
            except Exception as error:  # noqa: BLE001  (any display may fail in any way; none may stop training)
                self._displays.remove(display)
                logger.warning("%s is off from step %d on: %s", type(display).__name__, step, _reason(error))

    def close(self) -> None:
        """Close every writer."""
        for writer in [*([] if self._record is None else [self._record]), *self._displays]:
            try:
                writer.close()
            except Exception as error:  # noqa: BLE001  (as in write; each row of the record is flushed when written)
                logger.warning("%s did not close cleanly: %s", type(writer).__name__, _reason(error))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class TensorBoardWriter:
    """Writes one scalar per metric. ``resume_step`` hides what an earlier process wrote after that step."""

    def __init__(self, directory: Path, *, resume_step: int | None = None) -> None:
        if find_spec("tensorboard") is None:
            raise ConfigError(["TensorBoard output is on, but the package is not installed; pip install tensorboard"])
        # Here, not above: the import takes seconds and brings torch.
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if resume_step is None else resume_step + 1
        self._events = SummaryWriter(str(directory), purge_step=purge_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the scalars of one step."""
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)

    def write_samples(self, step: int, samples: Sequence[TextSample]) -> None:
        """Add one text a sample; TensorBoard reads Markdown, in which an indented line is text as it is."""
        for sample in samples:
            parts = {"prompt": sample.prompt, "answer": sample.answer, "reward": sample.verdict}
            blocks = (f"{name}:\n\n{textwrap.indent(text, '    ', lambda _: True)}" for name, text in parts.items())
            self._events.add_text(f"samples/{sample.which}", "\n\n".join(blocks), step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._events.close()


Mode = Literal["offline", "online", "disabled"]


def wandb_mode(asked: Mode | None) -> str:
    """Return ``asked``, else the environment variable ``WANDB_MODE``, else online where there is a key."""
    return asked or os.environ.get("WANDB_MODE") or ("online" if knows_wandb() else "offline")


def knows_wandb() -> bool:
    """Look for an API key in ``WANDB_API_KEY``, and where ``wandb login`` puts it."""
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "")).hostname or "api.wandb.ai"
    try:
        return bool(os.environ.get("WANDB_API_KEY") or netrc.netrc().authenticators(host))
    except (OSError, netrc.NetrcParseError):
        return False


class WandbWriter:
    """Feeds Weights & Biases from a daemon thread: training never waits for it.

    Where the client is missing or fails, one warning says so. Where it hangs (a login prompt, a proxy), rows wait in
    memory, and the thread is left behind in the end.
    """

    def __init__(
        self,
        project: str,
        name: str,
        directory: Path,
        config: Mapping[str, object],
        mode: Mode | None = None,
        entity: str | None = None,
    ) -> None:
        self._rows: queue.SimpleQueue[tuple[int, dict[str, float] | list[TextSample]] | None] = queue.SimpleQueue()
        arguments = {"project": project, "name": name, "dir": str(directory), "config": dict(config)}
        arguments |= {"mode": wandb_mode(mode), "entity": entity}
        if not (mode or os.environ.get("WANDB_MODE") or knows_wandb()):
            logger.info("wandb is offline: no API key (WANDB_API_KEY, wandb login); `wandb sync` sends %s", directory)
        self._thread = threading.Thread(target=self._run, args=(directory, arguments), name="wandb", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue one step; returns at once."""
        if self._thread.is_alive():
            self._rows.put((step, dict(metrics)))

    def write_samples(self, step: int, samples: Sequence[TextSample]) -> None:
        """Queue samples."""
        if self._thread.is_alive():
            self._rows.put((step, list(samples)))

    def close(self) -> None:
        """Let the queue drain for at most ``CLOSE_TIMEOUT_S``."""
        self._rows.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning(
                "wandb did not finish in %.0f s and is left behind; metrics.jsonl has every step", CLOSE_TIMEOUT_S
            )

    def _run(self, directory: Path, arguments: dict[str, object]) -> None:
        try:
            import wandb

            directory.mkdir(parents=True, exist_ok=True)
            # Console capture would wrap the stream the progress bar writes to.
            settings = wandb.Settings(console="off", silent=True, init_timeout=OPEN_TIMEOUT_S)
            run = wandb.init(**arguments, settings=settings)
            for step, what in iter(self._rows.get, None):
                run.log({"samples": _wandb_table(what)} if isinstance(what, list) else what, step=step)
            run.finish()
        except Exception as error:  # noqa: BLE001  (a third-party client may raise anything)
            logger.warning("wandb is off: %s", _reason(error))


def _wandb_table(samples: Sequence[TextSample]) -> object:
    import wandb

    names = [field.name for field in fields(TextSample)]
    return wandb.Table(columns=names, data=[[getattr(sample, name) for name in names] for sample in samples])
