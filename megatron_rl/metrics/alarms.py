"""Signs that a run is going wrong, found in the rows of ``metrics.jsonl``: one line per kind, at its first step.

Each compares means over `WINDOW` training steps: the first ones, the best ones and the last ones. For example::

    step 96: answers grow past the limit: 71% were truncated in the last 8 steps, 4% in the first 8; ...
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.metrics.evaluation import by_environment

logger = logging.getLogger(__name__)

WINDOW = 8
"""Training steps of a mean. Rewards of single steps dip in good runs, too."""
REWARD, CUT, LENGTH = "critic/rewards/mean", "response_length/clip_ratio", "response_length/mean"
ENTROPY, SIGNAL, GAP = "actor/entropy", "training/signal_share", "training/rollout_logprob_gap_mean"
REPEATED, HIGHEST = "response_length/repeated_share", "critic/rewards/max"
WATCHED = (REWARD, HIGHEST, CUT, LENGTH, ENTROPY, SIGNAL, GAP, REPEATED)

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Means:
    """Metrics of the first and of the last steps, NaN where one is missing."""

    first: Mapping[str, float]
    last: Mapping[str, float]
    best: float
    """Highest mean reward of `WINDOW` steps in a row."""
    highest: float
    """Highest reward of a sample so far."""

    @property
    def is_solved(self) -> bool:
        """Nearly every sample has the highest reward: then groups without variance and no entropy are success."""
        return self.last[REWARD] >= 0.9 * self.highest


@dataclass(frozen=True)
class Alarm:
    """One line of advice."""

    step: int
    kind: str
    text: str


def _reward_lost(m: Means) -> str | None:
    if m.best > 0 and m.last[REWARD] < 0.5 * m.best:
        return (
            f"the mean reward fell from {m.best:.2g} to {m.last[REWARD]:.2g}: lower --lr, and resume from a checkpoint "
            "before the fall"
        )
    return None


def _entropy_lost(m: Means) -> str | None:
    if m.last[ENTROPY] < 0.1 * m.first[ENTROPY] and m.last[SIGNAL] < 0.2 and not m.is_solved:
        return (
            f"the entropy fell from {m.first[ENTROPY]:.2g} to {m.last[ENTROPY]:.2g} nats and {m.last[SIGNAL]:.0%} of "
            f"the groups have reward variance, at a mean reward of {m.last[REWARD]:.2g}: the policy explores no more; "
            "lower --lr, raise --grpo-clamp-eps-upper or --grpo-entropy-term-weight"
        )
    return None


def _no_variance(m: Means) -> str | None:
    if m.last[SIGNAL] < 0.05 and m.highest > 0 and not m.is_solved:
        return (
            f"{m.last[SIGNAL]:.1%} of the groups have reward variance at a mean reward of {m.last[REWARD]:.2g}: the "
            "tasks are too easy or too hard; use --rl-dynamic-sampling or other tasks"
        )
    return None


def _too_long(m: Means) -> str | None:
    if m.last[CUT] >= 0.5 and m.last[CUT] >= m.first[CUT] + 0.3:
        return (
            f"answers grow past the limit: {m.last[CUT]:.0%} were truncated, {m.first[CUT]:.0%} in the first steps; "
            "read rollouts/, raise --rl-max-new-tokens, or penalize length"
        )
    return None


def _too_short(m: Means) -> str | None:
    if m.last[LENGTH] < 0.2 * m.first[LENGTH] and m.last[REWARD] <= m.first[REWARD]:
        return (
            f"answers shrank from {m.first[LENGTH]:.0f} to {m.last[LENGTH]:.0f} tokens without more reward: read "
            "rollouts/, and check what the reward gives to an empty answer"
        )
    return None


def _mismatch_grows(m: Means) -> str | None:
    if m.last[GAP] > 0.1 and m.last[GAP] > 5 * m.first[GAP]:
        return (
            f"the rollout-trainer mismatch grew from {m.first[GAP]:.2g} to {m.last[GAP]:.2g} nats per token: use a "
            "finer --rl-rollout-quantization, --rl-correction token_tis, or a lower --lr"
        )
    return None


def _repeats(m: Means) -> str | None:
    if m.last[REPEATED] > max(0.3, m.first[REPEATED] + 0.2):
        return (
            f"answers repeat themselves: {m.last[REPEATED]:.0%} of their 4-grams are repeats, {m.first[REPEATED]:.0%} "
            "in the first steps; read rollouts/, and check whether the reward pays for length"
        )
    return None


CHECKS: Mapping[str, Callable[[Means], str | None]] = {
    "reward collapse": _reward_lost, "entropy collapse": _entropy_lost, "no reward variance": _no_variance,
    "length explosion": _too_long, "length collapse": _too_short, "mismatch growth": _mismatch_grows,
    "repetition": _repeats,
}  # fmt: skip


@dataclass
class Watch:
    """Reads a run's rows in order and reports each kind of alarm once."""

    found: dict[str, Alarm] = field(default_factory=dict)
    _rows: list[Row] = field(default_factory=list)
    _best: float = float("-inf")
    _highest: float = float("-inf")
    _peaks: dict[str, tuple[int, float, float]] = field(default_factory=dict)
    """Environment -> step and value of its best evaluation, and the training reward at that time."""

    def see(self, step: int, row: Row) -> list[Alarm]:
        """Return the alarms that this row, of training or of an evaluation, is the first to give."""
        if isinstance(row.get(REWARD), int | float):
            self._rows.append({name: row.get(name) for name in WATCHED})
            del self._rows[WINDOW:-WINDOW]
            self._highest = max(self._highest, row.get(HIGHEST) or 0.0)
        new = [Alarm(step, kind, text) for kind, text in self._texts(step, row) if kind not in self.found]
        self.found.update({alarm.kind: alarm for alarm in new})
        return new

    def _texts(self, step: int, row: Row) -> Iterator[tuple[str, str]]:
        last = _means(self._rows[-WINDOW:])
        if isinstance(row.get(REWARD), int | float) and len(self._rows) >= WINDOW:
            self._best = max(self._best, last[REWARD])
        if len(self._rows) == 2 * WINDOW:
            means = Means(_means(self._rows[:WINDOW]), last, self._best, self._highest)
            yield from ((kind, text) for kind, check in CHECKS.items() if (text := check(means)) is not None)
        for environment, measures in by_environment(row).items():
            value = measures.get("pass@1", measures.get("reward"))
            if value is None:
                continue
            if not self._rows and not any(measures.get(name) for name in ("reward", "pass@1", "greedy")):
                yield "no reward", (
                    f"no held-out answer of {environment} is right before training: the answers may lack the form that "
                    "the reward looks for, or the tasks are too hard; read the answers in rollouts/"
                )
            yield from self._fallen(step, environment, value, measures.get("pass@1_ci95") or 0.0, last[REWARD])

    def _fallen(
        self, step: int, environment: str, value: float, interval: float, reward: float
    ) -> Iterator[tuple[str, str]]:
        peak = self._peaks.get(environment)
        if peak is None or value >= peak[1]:
            self._peaks[environment] = step, value, reward
            return
        best_step, best, before = peak
        if before != before:  # NaN: evaluated before the first training step
            before = _means(self._rows[:WINDOW])[REWARD]
        if value < best - max(0.05, 2 * interval) and reward > before + 0.01:
            yield "held-out falls", (
                f"held-out {environment} fell from {best:.3f} (step {best_step}) to {value:.3f} while the training "
                f"reward rose from {before:.2g} to {reward:.2g}: the reward is gamed, or the tasks are learned by "
                f"heart; read rollouts/, and go back to step {best_step}"
            )


def _means(rows: list[Row]) -> dict[str, float]:
    found = {}
    for name in WATCHED:
        values = [row[name] for row in rows if isinstance(row[name], int | float)]
        found[name] = sum(values) / len(values) if values else float("nan")
    return found


class AlarmWriter:
    """A display of `MetricLog` that logs each alarm when it is first seen."""

    def __init__(self, past: Iterable[Row]) -> None:
        """``past``: the rows of a resumed run, whose alarms have been logged."""
        self._watch = Watch()
        for row in past:
            self._watch.see(row["step"], row)

    def write(self, step: int, metrics: Row) -> None:
        """Log the alarms of one row."""
        for alarm in self._watch.see(step, metrics):
            logger.warning("step %d: %s: %s", step, alarm.kind, alarm.text)

    def write_samples(self, step: int, samples: Sequence[object]) -> None:
        """Ignore samples."""

    def close(self) -> None:
        """Nothing is open."""


def find_alarms(rows: Iterable[Row]) -> list[Alarm]:
    """Return the alarms of a run's recorded ``rows``, in the order of their steps."""
    watch = Watch()
    for row in rows:
        watch.see(row["step"], row)
    return list(watch.found.values())
