#!/usr/bin/env python
"""The README's picture: held-out pass@1 of every seed that `seeds.sh` has run, and their mean, as plain SVG."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from megatron_rl.metrics.jsonl import read_rows

METRIC = "val/arithmetic/pass@1"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 300, 48, 16, 34, 40
STYLE = "text{font:13px sans-serif;fill:#444}line{stroke:#ddd}polyline{fill:none;stroke:#2a6fdb}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--output", type=Path, default=Path("docs/images/quickstart.svg"))
    arguments = parser.parse_args()
    curves = [curve(path) for path in sorted(arguments.run_dir.glob("seed_*/metrics.jsonl"))]
    if not curves:
        raise SystemExit(f"{arguments.run_dir} has no seed_*/metrics.jsonl; run examples/quickstart/seeds.sh first")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(picture(curves))


def curve(path: Path) -> dict[int, float]:
    """Step -> pass@1."""
    return {row["step"]: row[METRIC] for row in read_rows(path) if row.get(METRIC) is not None}


def picture(curves: list[dict[int, float]]) -> str:
    """One thin line a seed, and the mean of the steps that all of them have."""
    steps = sorted(set.intersection(*map(set, curves)))
    last = steps[-1]
    lines = [polyline(each, last, 'stroke-width="1" opacity="0.35"') for each in curves]
    mean = {step: statistics.fmean(each[step] for each in curves) for step in steps}
    lines.append(polyline(mean, last, 'stroke-width="3"'))
    for value in (0, 0.25, 0.5, 0.75, 1):
        y = TOP + (HEIGHT - TOP - BOTTOM) * (1 - value)
        lines.insert(0, f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:g}" y2="{y:g}"/>')
        lines.append(f'<text x="8" y="{y + 4:g}">{value:.2f}</text>')
    for step in steps:
        lines.append(f'<text x="{x_of(step, last):g}" y="{HEIGHT - 18}" text-anchor="middle">{step}</text>')
    title = f"Held-out pass@1 by GRPO step: {len(curves)} seeds and their mean"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n'
        f"<title>{title}</title><style>{STYLE}</style>\n"
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>\n<text x="{LEFT}" y="20">{title}</text>\n'
        + "\n".join(lines)
        + "\n</svg>\n"
    )


def polyline(points: dict[int, float], last: int, look: str) -> str:
    """One line; ``last`` is the step at the right edge."""
    text = " ".join(
        f"{x_of(step, last):.1f},{TOP + (HEIGHT - TOP - BOTTOM) * (1 - value):.1f}"
        for step, value in sorted(points.items())
    )
    return f'<polyline points="{text}" {look}/>'


def x_of(step: int, last: int) -> float:
    """Pixels from the left."""
    return LEFT + (WIDTH - LEFT - RIGHT) * step / last


if __name__ == "__main__":
    main()
