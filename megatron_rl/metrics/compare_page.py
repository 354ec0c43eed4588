"""The page of `megatron_rl.metrics.compare`: tables, and curves drawn as SVG; no script, nothing is fetched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from megatron_rl.metrics.curves import MAX_POINTS, select_indices

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 560, 240, 56, 22, 8
COLOURS = 7
Point = tuple[int, float | None]
Table = tuple[Sequence[str], Sequence[Sequence[object]]]

STYLE = """
:root { color-scheme: light dark; --page: #f6f6f4; --card: #fff; --ink: #1c1c1a; --muted: #6b6b66; --line: #e2e2dd;
  --c0: #2a78d6; --c1: #e8702a; --c2: #1a9c78; --c3: #7a4fc9; --c4: #c8488f; --c5: #b58a00; --c6: #5c7a1f; }
@media (prefers-color-scheme: dark) { :root { --page: #171716; --card: #212120; --ink: #ededea; --muted: #a3a39d;
  --line: #383836; --c0: #5b9df0; --c1: #f28b4b; --c2: #35bd96; --c3: #a687ec; --c4: #e57ab5; --c5: #d6ae33;
  --c6: #93b552; } }
body { margin: 0 auto; max-width: 1240px; padding: 16px; background: var(--page); color: var(--ink);
  font: 14px/1.45 system-ui, sans-serif; }
h1 { font-size: 20px; } h2 { font-size: 16px; margin: 24px 0 8px; } h3 { font-size: 13px; margin: 0 0 4px; }
section { overflow-x: auto; } table { border-collapse: collapse; background: var(--card); }
td, th { border: 1px solid var(--line); padding: 4px 10px; text-align: left; vertical-align: top; }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 400px), 1fr)); gap: 12px; }
figure { margin: 0; padding: 10px; background: var(--card); border: 1px solid var(--line); border-radius: 6px; }
svg { width: 100%; height: auto; display: block; } text { fill: var(--muted); font-size: 12px; }
.key { margin: 8px 0; } .key span { display: inline-block; margin-right: 18px; }
.key b { display: inline-block; width: 14px; height: 4px; margin: 0 6px 3px 0; }
""".strip()


@dataclass(frozen=True)
class Curve:
    """A metric of all runs on one pair of axes."""

    title: str
    log: bool
    lines: Sequence[tuple[int, str, Sequence[Point]]]
    """Group, name of the run, and its values; None where one was not finite."""


def page(settings: Table, results: Table, groups: Sequence[str], curves: Sequence[Curve]) -> str:
    """The whole page; every text of a run is escaped."""
    key = "".join(
        f'<span><b style="background:{_colour(n)}"></b>{escape(name)}</span>' for n, name in enumerate(groups)
    )
    different = _table(settings) if settings[1] else "<p>All settings are the same.</p>"
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Runs compared</title><style>{STYLE}</style><h1>Runs compared</h1>"
        f"<h2>Results</h2><p>Mean ± standard deviation over runs that differ in their seed.</p>"
        f"<section>{_table(results)}</section>"
        f'<h2>Curves</h2><p class="key">{key}</p><div class="curves">{"".join(map(_figure, curves))}</div>'
        f"<h2>Settings that differ</h2><section>{different}</section></html>\n"
    )


def _table(table: Table) -> str:
    headers, rows = table
    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _colour(group: int) -> str:
    return f"var(--c{group % COLOURS})"


def _figure(curve: Curve) -> str:
    drawn = [(group, name, _visible(points, curve.log)) for group, name, points in curve.lines]
    values = [value for *_, points in drawn for _, value in points if value is not None]
    steps = [step for *_, points in drawn for step, _ in points]
    if not values:
        return ""
    low, high = min(values), max(values)
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    low, high, first, last = low - margin, high + margin, min(steps), max(max(steps), min(steps) + 1)

    def place(step: float, value: float) -> tuple[float, float]:
        across = LEFT + (step - first) / (last - first) * (WIDTH - LEFT - 8)
        return across, TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

    ticks = "".join(_tick(place(first, low + part * (high - low))[1], low + part * (high - low), curve.log)
                    for part in (0.05, 0.35, 0.65, 0.95))  # fmt: skip
    ends = "".join(f'<text x="{place(step, low)[0]:.0f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{step}</text>'
                   for step, anchor in ((first, "start"), (last, "end")))  # fmt: skip
    paths = "".join(
        f'<path d="{_path([None if v is None else place(s, v) for s, v in points])}" fill="none" '
        f'stroke="{_colour(group)}" stroke-width="1.6"><title>{escape(name)}</title></path>'
        for group, name, points in drawn
    )
    return (
        f'<figure><h3>{escape(curve.title)}</h3><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(curve.title)}">{ticks}{ends}{paths}</svg></figure>'
    )


def _visible(points: Sequence[Point], log: bool) -> list[Point]:
    """Few enough to draw; on a logarithmic axis what is not above 0 has no place."""
    if log:
        points = [(step, math.log10(v) if v is not None and v > 0 else None) for step, v in points]
    return [points[index] for index in select_indices([value for _, value in points], MAX_POINTS)]


def _tick(y: float, value: float, log: bool) -> str:
    shown = 10**value if log else value
    return (
        f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>'
        f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{shown:.3g}</text>'
    )


def _path(places: Sequence[tuple[float, float] | None]) -> str:
    """Pieces between the gaps; a point alone is a short stroke."""
    text, pen = [], False
    for place in places:
        if place is not None:
            text.append(f"{'L' if pen else 'M'}{place[0]:.1f} {place[1]:.1f}" + ("" if pen else "h0.1"))
        pen = place is not None
    return "".join(text)
