"""fidelity.html: curves of every recipe, one line the mean over seeds, as plain SVG."""

from __future__ import annotations

import html
import math
import statistics
from pathlib import Path

from settings import SETTINGS

from megatron_rl.metrics.jsonl import read_rows

WIDTH, HEIGHT, LEFT, BOTTOM = 560, 260, 56, 30
COLOURS = ("#444444", "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22")
CHARTS = (
    ("critic/rewards/mean", "Training reward", False),
    ("val/arithmetic/pass@1", "Held-out pass@1", False),
    ("training/rollout_logprob_gap_mean", "Mean |rollout - trainer| log-prob, nats", True),
)
Points = list[tuple[float, float]]


def write_page(run_dir: Path) -> None:
    """One section a setting that has results."""
    parts = [section(run_dir, name) for name in SETTINGS if (run_dir / name).is_dir()]
    style = "body{font:14px sans-serif;margin:24px}svg{margin:8px}text{font:11px sans-serif}"
    page = f"<!doctype html><meta charset=utf-8><title>Fidelity</title><style>{style}</style>{''.join(parts)}"
    (run_dir / "fidelity.html").write_text(page)


def section(run_dir: Path, setting: str) -> str:
    """The charts of one setting."""
    runs = sorted({path.parent.name for path in (run_dir / setting).glob("seed_*/*/metrics.jsonl")} - {"warm_start"})
    charts = "".join(
        chart(title, {name: mean_curve(run_dir / setting, name, metric) for name in runs}, logarithmic)
        for metric, title, logarithmic in CHARTS
    )
    return f"<h2>{html.escape(setting)}</h2>{charts}"


def mean_curve(folder: Path, run: str, metric: str) -> Points:
    """Mean over seeds of a metric at every step that has it."""
    by_step: dict[int, list[float]] = {}
    for path in folder.glob(f"seed_*/{run}/metrics.jsonl"):
        for row in read_rows(path):
            if row.get(metric) is not None:
                by_step.setdefault(row["step"], []).append(row[metric])
    return [(step, statistics.fmean(values)) for step, values in sorted(by_step.items())]


def chart(title: str, curves: dict[str, Points], logarithmic: bool) -> str:
    """One pair of axes with a legend."""
    curves = {name: scaled(points, logarithmic) for name, points in curves.items()}
    every = [point for points in curves.values() for point in points]
    if not every:
        return ""
    low, high = min(y for _, y in every), max(y for _, y in every)
    last = max(x for x, _ in every) or 1
    lines = []
    for index, (name, points) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(f"{x_of(x, last):.1f},{y_of(y, low, high):.1f}" for x, y in points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        lines.append(f'<text x="{WIDTH + 8}" y="{14 + 14 * index}" fill="{colour}">{html.escape(name)}</text>')
    for share in (0, 0.5, 1):
        value = low + share * (high - low)
        label = f"{10**value:.1e}" if logarithmic else f"{value:.2f}"
        lines.append(f'<text x="4" y="{y_of(value, low, high) + 4:.1f}">{label}</text>')
    lines.append(f'<text x="{LEFT}" y="{HEIGHT - 8}">step 0</text>')
    lines.append(f'<text x="{WIDTH - 40}" y="{HEIGHT - 8}">{last:g}</text>')
    frame = f'<rect x="{LEFT}" y="8" width="{WIDTH - LEFT}" height="{HEIGHT - BOTTOM - 8}" fill="none" stroke="#ccc"/>'
    return (
        f'<figure style="display:inline-block"><figcaption>{html.escape(title)}</figcaption>'
        f'<svg width="{WIDTH + 180}" height="{HEIGHT}">{frame}{"".join(lines)}</svg></figure>'
    )


def scaled(points: Points, logarithmic: bool) -> Points:
    """Decimal logarithms where asked for; values of 0 have none and are left out."""
    if not logarithmic:
        return points
    return [(x, math.log10(y)) for x, y in points if y > 0]


def x_of(x: float, last: float) -> float:
    """Pixels from the left."""
    return LEFT + (WIDTH - LEFT) * x / last


def y_of(y: float, low: float, high: float) -> float:
    """Pixels from the top."""
    return 8 + (HEIGHT - BOTTOM - 8) * (1 - (y - low) / ((high - low) or 1))
