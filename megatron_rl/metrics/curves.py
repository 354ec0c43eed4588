"""The learning curves of a report: which metrics share a chart, and few enough points to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_rl.metrics import names

MAX_POINTS = 500
PHASE_ORDER = ("gen", "reward", "advantages", "old_log_prob", "ref", "update_actor", "eval", "save")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """One metric of a chart."""

    metric: str
    label: str


@dataclass(frozen=True)
class Chart:
    """Metrics drawn on one pair of axes; shown when at least one of them was recorded."""

    title: str
    lines: tuple[Line, ...]
    scale: Literal["linear", "log"] = "linear"
    kind: Literal["line", "stack"] = "line"


@dataclass(frozen=True)
class Series:
    """The recorded values of a line; ``None`` where the value was NaN or infinite."""

    label: str
    steps: tuple[int, ...]
    values: tuple[float | None, ...]

    def pick(self, indices: Sequence[int]) -> dict[str, Any]:
        """The points at these indices, rounded, for embedding."""
        return {
            "label": self.label,
            "steps": [self.steps[index] for index in indices],
            "values": [round_number(self.values[index]) for index in indices],
        }


REWARD_CHART = Chart("Training reward", (Line(names.REWARD_MEAN, "reward"), Line(names.SCORE_MEAN, "score")))
SUPERVISED_CHARTS = (
    Chart("Supervised loss", (Line(names.SUPERVISED_LOSS, "loss"),)),
    Chart("Perplexity", (Line(names.PERPLEXITY, "perplexity"),), scale="log"),
)
LEARNING_CHARTS = (
    Chart("Entropy", (Line(names.ENTROPY, "entropy"),)),
    Chart("Gradient norm", (Line(names.GRAD_NORM, "gradient norm"),)),
    Chart(
        "Log-prob gap, engine and trainer",
        (Line(names.LOGPROB_GAP_MEAN, "mean"), Line(names.LOGPROB_GAP_MAX, "max")),
        scale="log",
    ),
    Chart("Policy loss", (Line(names.POLICY_LOSS, "policy loss"),)),
    Chart(
        "KL divergence",
        (Line(names.POLICY_KL, "to old policy"), Line(names.REFERENCE_KL_LOSS, "to reference")),
    ),
    Chart(
        "Clipped fraction",
        (
            Line(names.CLIP_FRACTION, "clipped tokens"),
            Line(names.CLIP_FRACTION_LOWER, "dual clip"),
            Line(names.RESPONSE_CLIP_RATIO, "answers cut at the limit"),
        ),
    ),
    Chart("Learning rate", (Line(names.LEARNING_RATE, "learning rate"),)),
)
SPEED_CHART = Chart(
    "Tokens per second", (Line(names.THROUGHPUT, "whole step"), Line(names.ROLLOUT_THROUGHPUT, "rollout"))
)


def charts_for(rows: Sequence[Row]) -> list[Chart]:
    """Every chart these rows could fill, in reading order; evaluations and phases are found by name."""
    recorded = list(dict.fromkeys(name for row in rows for name in row))
    held_out: dict[str, list[Line]] = {}
    lengths = [Line(names.RESPONSE_LENGTH_MEAN, "mean"), Line(names.RESPONSE_LENGTH_MAX, "max")]
    for name in recorded:
        environment, measure = names.split_validation(name) or ("", "")
        if measure == names.VALIDATION_LENGTH:
            lengths.append(Line(name, f"held-out {environment}"))
        elif measure and measure not in names.VALIDATION_COUNTS:
            held_out.setdefault(environment, []).append(Line(name, measure))
    evaluations = [Chart(f"Held-out: {name}", tuple(lines)) for name, lines in held_out.items()]
    length = Chart("Response length", tuple(lengths))
    phases = Chart("Seconds by phase", _phase_lines(recorded), kind="stack")
    idle = Chart("Idle share of the generation", _idle_lines(recorded))
    return [REWARD_CHART, *evaluations, *SUPERVISED_CHARTS, length, *LEARNING_CHARTS, SPEED_CHART, idle, phases]


def build_curves(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The charts that have data, ready for embedding."""
    curves = []
    for chart in charts_for(rows):
        series = stack_series(chart, rows) if chart.kind == "stack" else line_series(chart, rows)
        if series:
            curves.append(
                {
                    "title": chart.title,
                    "kind": chart.kind,
                    "scale": chart.scale,
                    "series": _stack_payload(series) if chart.kind == "stack" else _line_payload(series),
                    "nonfinite": sum(value is None for one in series for value in one.values),
                }
            )
    return curves


def line_series(chart: Chart, rows: Sequence[Row]) -> list[Series]:
    """The recorded lines of a chart; a line that only repeats an earlier one is left out."""
    found: list[Series] = []
    for line in chart.lines:
        points = [(row["step"], row[line.metric]) for row in rows if line.metric in row]
        steps, values = tuple(step for step, _ in points), tuple(value for _, value in points)
        if any(value is not None for value in values) and not any(
            (one.steps, one.values) == (steps, values) for one in found
        ):
            found.append(Series(line.label, steps, values))
    return found


def stack_series(chart: Chart, rows: Sequence[Row]) -> list[Series]:
    """Phases over common steps, absent ones as 0, and what the whole step took beyond them as ``other``."""
    if not chart.lines:
        return []
    steps = tuple(row["step"] for row in rows)
    columns = [(line.label, [row.get(line.metric) or 0.0 for row in rows]) for line in chart.lines]
    whole = [row.get(names.timing(names.WHOLE_STEP)) or 0.0 for row in rows]
    sums = [sum(values) for values in zip(*(values for _, values in columns), strict=True)]
    rest = [max(0.0, total - named) for total, named in zip(whole, sums, strict=True)]
    if any(rest):
        columns.append(("other", rest))
    return [Series(label, steps, tuple(values)) for label, values in columns]


def select_indices(values: Sequence[float | None], limit: int) -> list[int]:
    """At most ``limit`` indices: both ends, and the lowest and highest value of equal stretches between.

    Every n-th point would lose the spikes, which are what one looks for in a gradient norm.
    """
    count = len(values)
    if count <= limit:
        return list(range(count))
    stretches = (limit - 2) // 2
    chosen = {0, count - 1}
    for stretch in range(stretches):
        start = 1 + stretch * (count - 2) // stretches
        stop = 1 + (stretch + 1) * (count - 2) // stretches
        present = [(value, index) for index in range(start, stop) if (value := values[index]) is not None]
        if present:
            chosen |= {min(present)[1], max(present)[1]}
    return sorted(chosen)


def round_number(value: float | None) -> float | None:
    """Six significant digits: more than a screen shows, half the bytes."""
    return None if value is None else float(f"{value:.6g}")


def _line_payload(series: Sequence[Series]) -> list[dict[str, Any]]:
    return [one.pick(select_indices(one.values, MAX_POINTS)) for one in series]


def _stack_payload(series: Sequence[Series]) -> list[dict[str, Any]]:
    """Downsampled on the sum, so that the layers keep common steps."""
    layers = zip(*(one.values for one in series), strict=True)
    kept = select_indices([sum(value or 0.0 for value in values) for values in layers], MAX_POINTS)
    return [one.pick(kept) for one in series]


def _idle_lines(recorded: Sequence[str]) -> tuple[Line, ...]:
    """The mean, then every data-parallel rank."""
    prefix = f"{names.ROLLOUT_IDLE_SHARE}/"
    by_rank = [name for name in recorded if name.startswith(prefix)]
    ranks = [Line(name, name.removeprefix(prefix).replace("_", " ")) for name in by_rank]
    return (Line(names.ROLLOUT_IDLE_SHARE, "mean of the ranks"), *ranks)


def _phase_lines(recorded: Sequence[str]) -> tuple[Line, ...]:
    """Phases to add up: not the enclosing step, not parts of another phase (``gen/prefill``)."""
    timings = [name for name in recorded if name.startswith(names.TIMING_PREFIX)]
    phases = [name.removeprefix(names.TIMING_PREFIX) for name in timings]
    parts = [phase for phase in phases if phase != names.WHOLE_STEP and "/" not in phase]
    known = [phase for phase in PHASE_ORDER if phase in parts]
    return tuple(Line(names.timing(phase), phase) for phase in [*known, *sorted(set(parts) - set(known))])
