"""The reporter of a run with callbacks: it calls them, on rank 0, with what it is about to log."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from megatron_rl.callbacks import Callback, RunControl
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import ConfigError, TrainingError, one_line, shorten
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.collectives import broadcast_json
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.run.preflight import callback_classes
from megatron_rl.run.progress import Progress
from megatron_rl.run.reporting import Reporter
from megatron_rl.signals import StopRequest

logger = logging.getLogger(__name__)


class CallbackReporter(Reporter):
    """Calls ``callbacks``, and those of `--callbacks`; on other ranks than 0 there are none."""

    def __init__(self, config: RLConfig, groups: ParallelGroups, *others: Any, stop: StopRequest,
                 callbacks: Sequence[Callback]) -> None:  # fmt: skip
        super().__init__(config, groups, *others)
        self._stop = stop
        self._failure: str | None = None
        try:
            self._callbacks = [*(kind() for kind in callback_classes(config)), *callbacks] if groups.is_main else []
        except Exception as error:
            raise ConfigError([f"--callbacks: {one_line(repr(error))}; a class is called without arguments"]) from error
        self._control = RunControl(Path(config.logging.run_dir), config.total_steps)

    def open(self, progress: Progress) -> None:
        """See `Reporter`; collective, as the other ranks send the samples that rank 0's callbacks want."""
        super().open(progress)
        wanted = any(type(each).on_rollouts is not Callback.on_rollouts for each in self._callbacks)
        if broadcast_json(wanted, source=0):
            self._logged_groups = sys.maxsize

    def step(self, step: int, metrics: dict[str, float], policy: PolicyModel) -> None:
        """See `Reporter`. A stop is asked for last: a run that is asked to leaves the evaluation of its step out."""
        row = self._row(metrics, policy)
        evaluated = {name: value for name, value in row.items() if name.startswith("val/")}
        if evaluated:
            row |= self._changed("on_evaluation", step, evaluated)
        if step > 0 and not self._config.training.eval_only:
            row = self._changed("on_step", step, row)
        self._write_row(step, row)
        if self._control.stop_reason is not None:
            self._stop.ask(self._control.stop_reason)

    def finish(self, summary: dict[str, object]) -> None:
        """See `Reporter`; raises ``TrainingError`` if a callback has failed, now that the finished steps are saved."""
        if self._failure is not None:
            self.close()
            raise TrainingError(self._failure)
        super().finish(summary)

    def _write_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        for callback in tuple(self._callbacks):
            with self._blamed(callback, "on_rollouts", step):
                callback.on_rollouts(self._control, step, rows)
        if wanted := self._config.logging.rl_log_rollouts:
            super()._write_rollouts(step, [row for row in rows if row["group"] < wanted])

    def _changed(self, method: str, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Return ``metrics`` as the callbacks leave them, without what one has done that fails."""
        for callback in tuple(self._callbacks):
            given = dict(metrics)
            with self._blamed(callback, method, step):
                getattr(callback, method)(self._control, step, given)
                for name, value in given.items():
                    if name in ("step", "time", "nonfinite") or not isinstance(value, Real):  # columns of the record
                        raise TypeError(f"metrics[{name!r}] = {shorten(value)}: no number, or no name of a metric")
                metrics = given
        return metrics

    @contextlib.contextmanager
    def _blamed(self, callback: Callback, method: str, step: int) -> Iterator[None]:
        """Keep what the body raises for `finish`: an error now would be of one rank alone, and lose the step."""
        try:
            yield
        except Exception as error:
            text = f"callback {type(callback).__name__}: {method} of step {step} failed: {one_line(repr(error))}"
            logger.error("%s; the run saves and stops", text, exc_info=error)
            self._failure = self._failure or text
            self._callbacks.remove(callback)
            self._control.stop("a callback failed")
