"""Signs that a run is going wrong, found in the rows of ``metrics.jsonl``: one line per kind, at its first step.

Compares the first, the best and the last `WINDOW` training steps. For example::

    step 96: length explosion: 71% of answers are cut off, 4% at first: raise --rl-max-new-tokens or penalize length
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

from megatron_rl.metrics.evaluation import by_environment
from megatron_rl.metrics.rollouts import shorten
from megatron_rl.metrics.rundir import RunDirectory
from megatron_rl.metrics.writers import Display

logger = logging.getLogger(__name__)

WINDOW = 8
"""Training steps of a mean. Rewards of single steps dip in good runs, too."""
FEWEST_TASKS = 8
"""Of an evaluation without a right answer; with fewer tasks it may be chance."""
REWARD = "critic/rewards/mean"
NAMES = {
    "reward": ("rollout/score/mean", REWARD), "signal": ("training/counting_share", "training/signal_share"),
    "cut": ("response_length/clip_ratio",), "length": ("response_length/mean",), "entropy": ("actor/entropy",),
    "gap": ("training/rollout_logprob_gap_mean",), "repeated": ("response_length/repeated_share",),
}  # fmt: skip
"""With dynamic sampling a step also has reward and reward variance of all groups drawn: these come first."""
NO_REWARD = "the answers lack the form that the reward looks for, or the tasks are too hard; read rollouts/"

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Alarm:
    """One line of advice."""

    step: int
    kind: str
    text: str


CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "reward collapse": (
        lambda h: h.last.highest < (h.low + h.best) / 2 and h.best - h.last.reward > 0.05 * (h.high - h.low),
        "the mean reward fell from {best:.2g} to {last.reward:.2g}: lower --lr, and resume from before the fall",
    ),
    "entropy collapse": (
        lambda h: h.last.entropy < 0.1 * h.first.entropy and h.last.signal < 0.2 and not h.is_solved,
        "entropy fell from {first.entropy:.2g} to {last.entropy:.2g} nats: lower --lr or raise --grpo-clamp-eps-upper",
    ),
    "no reward variance": (
        lambda h: h.last.signal < 0.05 and h.high > h.low and not h.is_solved and "reward collapse" not in h.found,
        "{last.signal:.1%} of groups have reward variance: take easier or harder tasks, or use --rl-dynamic-sampling",
    ),
    "length explosion": (
        lambda h: h.last.cut >= max(0.5, h.first.cut + 0.3),
        "{last.cut:.0%} of answers are cut off, {first.cut:.0%} at first: raise --rl-max-new-tokens or penalize length",
    ),
    "length collapse": (
        lambda h: h.last.length < 0.2 * h.first.length and h.last.reward <= h.first.reward and not h.is_solved,
        "answers shrank from {first.length:.0f} to {last.length:.0f} tokens without more reward: read rollouts/",
    ),
    "mismatch growth": (
        lambda h: h.last.gap > max(0.1, 5 * h.first.gap),
        "the rollout-trainer mismatch grew from {first.gap:.2g} to {last.gap:.2g} nats: use token_tis or a lower --lr",
    ),
    "repetition": (
        lambda h: h.last.repeated > max(0.3, h.first.repeated + 0.2),
        "{last.repeated:.0%} of 4-grams are repeats, {first.repeated:.0%} at first: does the reward pay for length?",
    ),
}
"""When each kind is given, and its line. Rewards count from the lowest one, since they may be negative.

Where a task is solved, groups without variance and little entropy are success.
"""


@dataclass
class Watch:
    """Reads a run's rows in order and reports each kind of alarm once."""

    found: dict[str, Alarm] = field(default_factory=dict)
    _steps: list[dict[str, float]] = field(default_factory=list)
    """The first and the last `WINDOW` training steps."""
    _best: float = -math.inf
    """Highest mean reward of `WINDOW` steps in a row; below, the rewards of the worst and of the best sample."""
    _low: float = math.inf
    _high: float = -math.inf
    _peaks: dict[str, tuple[int, float, float]] = field(default_factory=dict)
    """Environment -> step and value of its best evaluation, and the training reward at that time."""
    _falling: set[str] = field(default_factory=set)
    """Environments whose last evaluation was below their best while the training reward had risen."""

    def see(self, step: int, row: Row) -> list[Alarm]:
        """Return the alarms that this row, of training or of an evaluation, is the first to give."""
        known = len(self.found)
        for kind, text in chain(self._trained(row), self._evaluated(step, by_environment(row))):
            self.found.setdefault(kind, Alarm(step, kind, text))
        return [*self.found.values()][known:]

    def _trained(self, row: Row) -> Iterator[tuple[str, str]]:
        if math.isnan(_number(row, REWARD)):
            return
        self._steps.append({name: _number(row, *metrics) for name, metrics in NAMES.items()})
        del self._steps[WINDOW:-WINDOW]
        self._low = min(self._low, _number(row, "critic/rewards/min", REWARD))
        self._high = max(self._high, _number(row, "critic/rewards/max", REWARD))
        if len(self._steps) < WINDOW:
            return
        first, last = _means(self._steps[:WINDOW]), _means(self._steps[-WINDOW:])
        self._best = max(self._best, last.reward)
        if self._low == self._high <= 0:
            yield "no reward", f"every reward of {WINDOW} steps was {self._high:g}: {NO_REWARD}"
        if len(self._steps) == 2 * WINDOW:
            h = SimpleNamespace(first=first, last=last, best=self._best, low=self._low, high=self._high)
            h.found, h.is_solved = self.found, last.reward - h.low >= 0.75 * (h.high - h.low)
            yield from ((kind, text.format(**vars(h))) for kind, (holds, text) in CHECKS.items() if holds(h))

    def _evaluated(self, step: int, results: Mapping[str, Row]) -> Iterator[tuple[str, str]]:
        tasks = sum(_number(row, "num_tasks") for row in results.values())
        if tasks >= FEWEST_TASKS and not self._high > self._low and all(map(_none_right, results.values())):
            yield "no reward", f"no held-out answer of {', '.join(results)} is right: {NO_REWARD}"
        for environment, measures in results.items():
            yield from self._fallen(step, environment, measures)

    def _fallen(self, step: int, environment: str, measures: Row) -> Iterator[tuple[str, str]]:
        value, spread = _number(measures, "pass@1", "reward"), self._high - self._low
        reward = _means(self._steps[-WINDOW:]).reward
        peak_step, peak, before = self._peaks.get(environment, (step, value, reward))
        if value >= peak:
            self._peaks[environment] = step, value, reward
        if math.isnan(before):  # evaluated before the first training step
            before = _means(self._steps[:WINDOW]).reward
        margin = max(0.05, 2 * _number(measures, "pass@1_ci95")) if "pass@1" in measures else 0.05 * spread
        falls = value < peak - margin and reward > before + 0.01 * spread
        if falls and environment in self._falling:
            yield "held-out falls", (
                f"{environment} fell from {peak:.3f} (step {peak_step}) to {value:.3f} while the training reward rose "
                f"from {before:.2g} to {reward:.2g}: the reward is gamed or tasks are memorized; read rollouts/"
            )
        (self._falling.add if falls else self._falling.discard)(environment)


def _number(row: Row, *names: str) -> float:
    """Return the first of these metrics that the row has as a finite number, else NaN."""
    values = (row[name] for name in names if isinstance(row.get(name), int | float))
    return next((value for value in values if math.isfinite(value)), math.nan)


def _none_right(row: Row) -> bool:
    """Return whether an evaluation has neither right answers nor partial credit."""
    return _number(row, "pass@1", "reward") == 0 and not any(_number(row, name) > 0 for name in ("greedy", "reward"))


def _means(steps: Sequence[Mapping[str, float]]) -> SimpleNamespace:
    known = {name: [step[name] for step in steps if not math.isnan(step[name])] or [math.nan] for name in NAMES}
    means = {name: sum(values) / len(values) for name, values in known.items()}
    return SimpleNamespace(**means, highest=max(known["reward"]))


class AlarmWriter(Display):
    """A display of `MetricLog` that logs each alarm when it is first seen."""

    def __init__(self, past: Iterable[Row], run: RunDirectory) -> None:
        """``past``: the rows of a resumed ``run``, whose alarms have been logged."""
        self._watch, self._run = Watch(), run
        for row in past:
            self._watch.see(row["step"], row)

    def write(self, step: int, metrics: Row) -> None:
        """Log the alarms of one row."""
        for alarm in self._watch.see(step, metrics):
            answers = self._answers(step) if alarm.kind == "no reward" else ""
            logger.warning("step %d: %s: %s%s", step, alarm.kind, alarm.text, answers)

    def _answers(self, step: int) -> str:
        """Quote answers of the step's evaluation, else of its training, where they are recorded."""
        for path in (self._run.evaluation_path(step), self._run.rollouts_path(step)):
            if path.is_file():
                rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
                first = (row for row in rows if not row["sample"] and not row["branch"] and not row.get("greedy"))
                pairs = ((shorten(row["completion"], 50, 30), shorten(row["gold"] or "?", 30, 0)) for row in first)
                texts = (f"{answer!r} (right: {gold})" for answer, gold in pairs)
                return f"; answers: {', '.join(islice(texts, 3))}"
        return ""


def find_alarms(rows: Sequence[Row]) -> list[Alarm]:
    """Return the alarms of an RL run's recorded ``rows``, in the order of their steps; none without training steps."""
    watch = Watch()
    for row in rows if any(REWARD in row for row in rows) else ():
        watch.see(row["step"], row)
    return [*watch.found.values()]
