"""The learning curves of a report: which metrics share a chart, and few enough points to draw."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_rl.metrics.evaluation import COUNTS, by_environment

MAX_POINTS = 500
PHASE_ORDER = (
    "gen", "reward", "advantages", "old_log_prob", "ref", "values", "update_critic", "update_actor", "eval", "save",
)  # fmt: skip

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Chart:
    """Metrics drawn on one pair of axes, if at least one of them was recorded."""

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
    color: int | None = None
    """Lines of equal numbers look alike; without one each line of a chart has its own."""
    low: list[float | None] | None = None
    high: list[float | None] | None = None
    """The ends of a band around it, where it is a mean."""


def charts_for(rows: Sequence[Row]) -> list[Chart]:
    """Return every chart these rows could fill, in reading order; evaluations, phases and ranks are found by name."""
    recorded = list(dict.fromkeys(name for row in rows for name in row))
    lengths = {"response_length/mean": "mean", "response_length/max": "max"}
    truncated = {"response_length/clip_ratio": "training"}
    held_out_rewards: dict[str, str] = {}
    # Lengths, cuts and rewards have scales of their own: beside them shares of right answers would be flat lines.
    elsewhere = {"response_length": lengths, "truncated": truncated, "reward": held_out_rewards}
    held_out: dict[str, dict[str, str]] = {}
    for environment, measures in by_environment(dict.fromkeys(recorded, 0.0)).items():
        held_out[environment] = {}
        for measure in (measure for measure in measures if measure not in COUNTS):
            metric = f"val/{environment}/{measure}"
            if measure in elsewhere:
                elsewhere[measure][metric] = f"held-out {environment}"
            else:
                held_out[environment][metric] = measure
        reward, passed = f"val/{environment}/reward", f"val/{environment}/pass@1"
        if all(row.get(reward) == row.get(passed) for row in rows):
            held_out_rewards.pop(reward, None)
    trained = trained_environments(rows)
    by_name = trained if len(trained) > 1 else []
    rewards = {f"reward/{name}/mean": name for name in by_name}
    informative = {f"reward/{name}/signal_share": name for name in by_name}
    idle = "perf/rollout_idle_share"
    ranks = {name: name.removeprefix(f"{idle}/").replace("_", " ") for name in recorded if name.startswith(f"{idle}/")}
    gap = {"training/rollout_logprob_gap_mean": "mean", "training/rollout_logprob_gap_max": "max"}
    clipped = {"actor/pg_clipfrac": "clipped", "actor/pg_clipfrac_lower": "dual clip"}
    return [
        Chart("Training reward", {"critic/rewards/mean": "reward", "critic/score/mean": "score", **rewards}),
        *(Chart(f"Held-out: {name}", lines) for name, lines in held_out.items()),
        Chart("SFT loss", {"train/loss": "loss"}),
        Chart("Perplexity", {"train/perplexity": "perplexity"}, scale="log"),
        Chart("Response length", lengths),
        Chart("Share of answers cut at the limit", truncated),
        Chart("Share of groups with reward variance", {"training/signal_share": "all", **informative}),
        Chart("Held-out reward", held_out_rewards),
        Chart("Entropy", {"actor/entropy": "entropy"}),
        Chart("Gradient norm", {"actor/grad_norm": "gradient norm"}),
        Chart("Rollout-trainer mismatch of log-probs", gap, scale="log"),
        Chart("Policy loss", {"actor/pg_loss": "policy loss"}),
        Chart("KL divergence", {"actor/ppo_kl": "to old policy", "actor/kl_loss": "to reference"}),
        Chart("Share of tokens clipped", clipped),
        Chart("Learning rate", {"actor/lr": "learning rate"}),
        Chart("Tokens per second", {"perf/throughput": "whole step", "perf/rollout_tokens_per_s": "rollout"}),
        Chart("Idle share of the generation", {idle: "mean of the ranks", **ranks}),
        Chart("Seconds by phase", _phase_lines(recorded), kind="stack"),
    ]


def trained_environments(rows: Sequence[Row]) -> list[str]:
    """Return the environments with a metric ``reward/<environment>/mean``, in the order they came up."""
    found = (re.fullmatch("reward/(.*)/mean", name) for name in dict.fromkeys(name for row in rows for name in row))
    return [match[1] for match in found if match]


def build_curves(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the charts that have data, few enough points of each, ready for embedding."""
    curves = []
    for chart in charts_for(rows):
        stacked = chart.kind == "stack"
        series = stack_series(chart, rows) if stacked else line_series(chart, rows)
        # The layers of a stack keep common steps.
        sums = [sum(values) for values in zip(*(one.values for one in series), strict=True)] if stacked else None
        if series:
            curves.append(drawn(chart, series, sums))
    return curves


def drawn(chart: Chart, series: Sequence[Series], sums: Sequence[float] | None = None) -> dict[str, Any]:
    """Return what ``charts.js`` draws: few points of each series, chosen by ``sums`` where steps are common."""
    return {
        "title": chart.title,
        "kind": chart.kind,
        "scale": chart.scale,
        "series": [_points(one, select_indices(sums or one.values, MAX_POINTS)) for one in series],
        "nonfinite": sum(value is None for one in series for value in one.values),
    }


def _points(series: Series, indices: Sequence[int]) -> dict[str, Any]:
    own = {} if series.color is None else {"color": series.color}
    for name, values in (("low", series.low), ("high", series.high)):
        own |= {} if values is None else {name: [round_number(values[index]) for index in indices]}
    return own | {
        "label": series.label,
        "steps": [series.steps[index] for index in indices],
        "values": [round_number(series.values[index]) for index in indices],
    }


def line_series(chart: Chart, rows: Sequence[Row]) -> list[Series]:
    """Return the lines of a chart that have a finite value, without those that only repeat an earlier one."""
    found: list[Series] = []
    for metric, label in chart.lines.items():
        recorded = [row for row in rows if metric in row]
        steps, values = [row["step"] for row in recorded], [row[metric] for row in recorded]
        repeats = (steps, values) in [(one.steps, one.values) for one in found]
        if not repeats and any(value is not None for value in values):
            found.append(Series(label, steps, values))
    return found


def stack_series(chart: Chart, rows: Sequence[Row]) -> list[Series]:
    """Return phases over common steps, absent ones as 0, and what the step took beyond them as ``other``."""
    if not chart.lines:
        return []
    steps = [row["step"] for row in rows]
    columns = {label: [row.get(metric) or 0.0 for row in rows] for metric, label in chart.lines.items()}
    whole = [row.get("timing_s/step") or 0.0 for row in rows]
    rest = [max(0.0, total - sum(named)) for total, *named in zip(whole, *columns.values(), strict=True)]
    if any(rest):
        columns["other"] = rest
    return [Series(label, steps, values) for label, values in columns.items()]


def select_indices(values: Sequence[float | None], limit: int) -> list[int]:
    """Return at most ``limit`` indices: both ends, and the lowest and highest value of equal stretches between.

    Every n-th point would lose the spikes.
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
    """Round to six significant digits: more than a screen shows, half the bytes."""
    return None if value is None else float(f"{value:.6g}")


def _phase_lines(recorded: Sequence[str]) -> dict[str, str]:
    """Phases to add up: not the enclosing step, not parts of another phase (``gen/prefill``)."""
    phases = {name.removeprefix("timing_s/") for name in recorded if name.startswith("timing_s/")}
    parts = sorted(phase for phase in phases if phase != "step" and "/" not in phase)
    known = [phase for phase in PHASE_ORDER if phase in parts]
    return {f"timing_s/{phase}": phase for phase in dict.fromkeys([*known, *parts])}
