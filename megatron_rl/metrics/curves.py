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
class Chart:
    """Metrics drawn on one pair of axes; shown when at least one of them was recorded."""

    title: str
    lines: Mapping[str, str]
    """Metric -> label."""
    scale: Literal["linear", "log"] = "linear"
    kind: Literal["line", "stack"] = "line"


@dataclass(frozen=True)
class Series:
    """The recorded values of a line; ``None`` where the value was NaN or infinite."""

    label: str
    steps: list[int]
    values: list[float | None]


REWARD_CHART = Chart("Training reward", {names.REWARD_MEAN: "reward", names.SCORE_MEAN: "score"})
SUPERVISED_CHARTS = (
    Chart("Supervised loss", {names.SUPERVISED_LOSS: "loss"}),
    Chart("Perplexity", {names.PERPLEXITY: "perplexity"}, scale="log"),
)
LEARNING_CHARTS = (
    Chart("Entropy", {names.ENTROPY: "entropy"}),
    Chart("Gradient norm", {names.GRAD_NORM: "gradient norm"}),
    Chart(
        "Log-prob gap, engine and trainer",
        {names.LOGPROB_GAP_MEAN: "mean", names.LOGPROB_GAP_MAX: "max"},
        scale="log",
    ),
    Chart("Policy loss", {names.POLICY_LOSS: "policy loss"}),
    Chart("KL divergence", {names.POLICY_KL: "to old policy", names.REFERENCE_KL_LOSS: "to reference"}),
    Chart(
        "Clipped fraction",
        {
            names.CLIP_FRACTION: "clipped tokens",
            names.CLIP_FRACTION_LOWER: "dual clip",
            names.RESPONSE_CLIP_RATIO: "answers cut at the limit",
        },
    ),
    Chart("Learning rate", {names.LEARNING_RATE: "learning rate"}),
)
SPEED_CHART = Chart("Tokens per second", {names.THROUGHPUT: "whole step", names.ROLLOUT_THROUGHPUT: "rollout"})


def charts_for(rows: Sequence[Row]) -> list[Chart]:
    """Every chart these rows could fill, in reading order; evaluations and phases are found by name."""
    recorded = list(dict.fromkeys(name for row in rows for name in row))
    held_out: dict[str, dict[str, str]] = {}
    lengths = {names.RESPONSE_LENGTH_MEAN: "mean", names.RESPONSE_LENGTH_MAX: "max"}
    for name in recorded:
        environment, measure = names.split_validation(name) or ("", "")
        if measure == names.VALIDATION_LENGTH:
            lengths[name] = f"held-out {environment}"
        elif measure and measure not in names.VALIDATION_COUNTS:
            held_out.setdefault(environment, {})[name] = measure
    evaluations = [Chart(f"Held-out: {name}", lines) for name, lines in held_out.items()]
    length = Chart("Response length", lengths)
    phases = Chart("Seconds by phase", _phase_lines(recorded), kind="stack")
    idle = Chart("Idle share of the generation", _idle_lines(recorded))
    return [REWARD_CHART, *evaluations, *SUPERVISED_CHARTS, length, *LEARNING_CHARTS, SPEED_CHART, idle, phases]


def build_curves(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The charts that have data, few enough points of each, ready for embedding."""
    curves = []
    for chart in charts_for(rows):
        if chart.kind == "stack":
            series = stack_series(chart, rows)
            sums = [
                sum(value or 0.0 for value in layers) for layers in zip(*(one.values for one in series), strict=True)
            ]
            kept = [select_indices(sums, MAX_POINTS)] * len(series)  # so that the layers keep common steps
        else:
            series = line_series(chart, rows)
            kept = [select_indices(one.values, MAX_POINTS) for one in series]
        if series:
            curves.append(
                {
                    "title": chart.title,
                    "kind": chart.kind,
                    "scale": chart.scale,
                    "series": [_points(one, indices) for one, indices in zip(series, kept, strict=True)],
                    "nonfinite": sum(value is None for one in series for value in one.values),
                }
            )
    return curves


def _points(series: Series, indices: Sequence[int]) -> dict[str, Any]:
    return {
        "label": series.label,
        "steps": [series.steps[index] for index in indices],
        "values": [round_number(series.values[index]) for index in indices],
    }


def line_series(chart: Chart, rows: Sequence[Row]) -> list[Series]:
    """The recorded lines of a chart; a line that only repeats an earlier one is left out."""
    found: list[Series] = []
    for metric, label in chart.lines.items():
        recorded = [row for row in rows if metric in row]
        steps, values = [row["step"] for row in recorded], [row[metric] for row in recorded]
        repeats = any((one.steps, one.values) == (steps, values) for one in found)
        if any(value is not None for value in values) and not repeats:
            found.append(Series(label, steps, values))
    return found


def stack_series(chart: Chart, rows: Sequence[Row]) -> list[Series]:
    """Phases over common steps, absent ones as 0, and what the whole step took beyond them as ``other``."""
    if not chart.lines:
        return []
    steps = [row["step"] for row in rows]
    columns = {label: [row.get(metric) or 0.0 for row in rows] for metric, label in chart.lines.items()}
    whole = [row.get(names.timing(names.WHOLE_STEP)) or 0.0 for row in rows]
    rest = [max(0.0, total - sum(named)) for total, *named in zip(whole, *columns.values(), strict=True)]
    if any(rest):
        columns["other"] = rest
    return [Series(label, steps, values) for label, values in columns.items()]


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


def _idle_lines(recorded: Sequence[str]) -> dict[str, str]:
    """The mean, then every data-parallel rank."""
    prefix = f"{names.ROLLOUT_IDLE_SHARE}/"
    ranks = {name: name.removeprefix(prefix).replace("_", " ") for name in recorded if name.startswith(prefix)}
    return {names.ROLLOUT_IDLE_SHARE: "mean of the ranks", **ranks}


def _phase_lines(recorded: Sequence[str]) -> dict[str, str]:
    """Phases to add up: not the enclosing step, not parts of another phase (``gen/prefill``)."""
    phases = {name.removeprefix(names.TIMING_PREFIX) for name in recorded if name.startswith(names.TIMING_PREFIX)}
    parts = sorted(phase for phase in phases if phase != names.WHOLE_STEP and "/" not in phase)
    known = [phase for phase in PHASE_ORDER if phase in parts]
    return {names.timing(phase): phase for phase in dict.fromkeys([*known, *parts])}
