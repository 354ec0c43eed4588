"""megatron-rl compare RUN RUN ...: settings in which runs differ, their results, and their curves on one page.

Runs that differ only in their seed are one group: a mean and a standard deviation, in curves a mean and a band.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.atomic import write_text_atomic
from megatron_rl.errors import ConfigError
from megatron_rl.metrics.console import format_table
from megatron_rl.metrics.curves import Chart, Row, Series, charts_for, drawn
from megatron_rl.metrics.evaluation import COUNTS, by_environment, last_evaluation
from megatron_rl.metrics.jsonl import read_steps
from megatron_rl.metrics.report import build_page
from megatron_rl.metrics.rundir import RunDirectory
from megatron_rl.user_files import named_path

LAST_STEPS = 10
"""A training reward is the mean over so many steps: one step is a few prompts."""
_OF_THE_PLACE = frozenset({
    "run_dir", "save", "tensorboard_dir", "wandb_exp_name", "wandb_save_dir", "wandb_project", "wandb_mode", "config",
    "resume", "rl_environment_port",
})  # fmt: skip
"""Settings that change nothing about what is learnt."""
_MEASURED = {
    "critic/rewards/mean": "reward", "response_length/mean": "answer length", "actor/entropy": "entropy",
    "train/loss": "loss", "timing_s/step": "seconds a step",
}  # fmt: skip


@dataclass(frozen=True)
class ComparedRun:
    """A run directory as read; in ``settings`` paths below it begin with ``RUN/``."""

    name: str
    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    @property
    def results(self) -> dict[str, float]:
        """The last evaluation, and means over the last steps."""
        found: dict[str, float] = {"steps": self.rows[-1]["step"]}
        for environment, measures in by_environment(last_evaluation(self.rows)).items():
            shown = {name: value for name, value in measures.items() if name not in COUNTS and value is not None}
            found |= {f"{environment} {name}": value for name, value in shown.items()}
        for metric, label in _MEASURED.items():
            values = [value for row in self.rows if (value := row.get(metric)) is not None][-LAST_STEPS:]
            if values:
                found[label] = statistics.fmean(values)
        return found


def read_run(path: Path) -> ComparedRun:
    """Read the run in ``path``; ``ConfigError`` if there is none, or it has no steps yet."""
    directory = RunDirectory(path)
    found = directory.read_settings()
    own = found["run_dir"]
    settings = {name: _placed(value, own) for name, value in found.items() if name not in _OF_THE_PLACE}
    rows = read_steps(directory.metrics)
    if not rows:
        raise ConfigError([f"{path} has no steps yet; compare it later"])
    return ComparedRun(str(path), settings, rows)


def _placed(value: Any, own: str) -> Any:
    return f"RUN{value.removeprefix(own)}" if isinstance(value, str) and value.startswith(f"{own}/") else value


def differences(runs: Sequence[ComparedRun]) -> dict[str, list[Any]]:
    """Return setting -> its value in each run where they differ, without settings that only follow another one."""
    found: dict[str, list[Any]] = {}
    for name in dict.fromkeys(name for run in runs for name in run.settings):
        values = [run.settings.get(name) for run in runs]
        repeats = any(values == others for name, others in found.items() if name != "seed")
        if any(value != values[0] for value in values) and not repeats:
            found[name] = values
    return found


def groups_of(runs: Sequence[ComparedRun]) -> dict[str, list[int]]:
    """Return names -> indices of the runs that differ in their seed alone."""
    differing = [values for name, values in differences(runs).items() if name != "seed"]
    groups: dict[tuple[str, ...], list[int]] = {}
    for index in range(len(runs)):
        groups.setdefault(tuple(str(values[index]) for values in differing), []).append(index)
    return {", ".join(runs[index].name for index in indices): indices for indices in groups.values()}


def summary_rows(runs: Sequence[ComparedRun], groups: Mapping[str, Sequence[int]]) -> list[list[object]]:
    """Return a row for each measure: mean, and sample standard deviation over the runs of a group."""
    results = [run.results for run in runs]
    names = dict.fromkeys(name for each in results for name in each)
    rows: list[list[object]] = []
    for name in names:
        cells = []
        for indices in groups.values():
            values = [results[index][name] for index in indices if name in results[index]]
            spread = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
            cells.append(f"{statistics.fmean(values):.4g}{spread}" if values else "-")
        rows.append([name, *cells])
    return rows


def curves_of(runs: Sequence[ComparedRun], groups: Mapping[str, Sequence[int]]) -> list[tuple[Chart, list[Series]]]:
    """Return a chart for each recorded metric, in the report's order, with a line for each group."""
    curves = []
    for chart in charts_for([row for run in runs for row in run.rows]):
        for metric, label in chart.lines.items() if chart.kind == "line" else ():
            series = (
                _mean_and_band([runs[index].rows for index in indices], metric, name, color)
                for color, (name, indices) in enumerate(groups.items())
            )
            if lines := [line for line in series if line is not None]:
                title = chart.title if len(chart.lines) == 1 else f"{chart.title}: {label}"
                curves.append((Chart(title, {metric: label}, chart.scale), lines))
    return curves


def _mean_and_band(seeds: Sequence[Sequence[Row]], metric: str, label: str, color: int) -> Series | None:
    """Average over the seeds that have a finite value at a step; None if there is no such step."""
    found: dict[int, list[float]] = {row["step"]: [] for rows in seeds for row in rows if metric in row}
    for row in (row for rows in seeds for row in rows if row.get(metric) is not None):
        found[row["step"]].append(row[metric])
    steps = sorted(found)
    mean, *ends = ([of(found[step]) if found[step] else None for step in steps] for of in (statistics.fmean, min, max))
    return Series(label, steps, mean, color, *(ends if len(seeds) > 1 else ())) if any(found.values()) else None


def csv_text(curves: Sequence[tuple[Chart, Sequence[Series]]]) -> str:
    """Write every point of ``curves``; what was not finite is empty."""
    table = csv.writer(stream := io.StringIO(), lineterminator="\n")
    table.writerow(("metric", "runs", "step", "mean", "lowest", "highest"))
    for metric, line in ((*chart.lines, line) for chart, lines in curves for line in lines):
        points = zip(line.steps, line.values, line.low or line.values, line.high or line.values, strict=True)
        table.writerows((metric, line.label, *point) for point in points)
    return stream.getvalue()


def draw(path: Path, curves: Sequence[tuple[Chart, Sequence[Series]]]) -> None:
    """Draw the charts, three in a row, with one legend."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows, legend = -(-len(curves) // 3), {}
    with rc_context({"text.parse_math": False}):  # a run's name is no formula
        figure = Figure(figsize=(15, 3 * rows + 0.6), layout="constrained")
        for place, (chart, lines) in enumerate(curves, start=1):
            axis = figure.add_subplot(rows, 3, place, title=chart.title, yscale=chart.scale, xlabel="step")
            axis.xaxis.get_major_locator().set_params(integer=True)
            for line in lines:
                band = (line.low or line.values, line.values, line.high or line.values)
                low, mean, high = np.array(band, dtype=float)  # of None nan, which is not drawn
                [legend[line.label]] = axis.plot(line.steps, mean, color=f"C{line.color}")
                axis.fill_between(line.steps, low, high, color=f"C{line.color}", alpha=0.2, linewidth=0)
        figure.legend(legend.values(), legend.keys(), loc="outside upper center", ncols=4)
        figure.savefig(path, dpi=110)


def main(words: Sequence[str] | None = None) -> int:
    """Return command line: a table on the screen, and a page."""
    parser = argparse.ArgumentParser(
        prog="megatron-rl compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=named_path, nargs="+", metavar="RUN", help="run directories, two or more")
    parser.add_argument("--output", type=named_path, default=Path("compare.html"), help="the page (compare.html)")
    parser.add_argument("--csv", type=named_path, metavar="FILE", help="write the points of the curves")
    parser.add_argument("--png", type=named_path, metavar="FILE", help="draw the curves with matplotlib")
    options = parser.parse_args(words)
    if len(options.runs) < 2:
        parser.error("give two run directories or more")
    if options.png is not None and find_spec("matplotlib") is None:
        parser.error("--png needs matplotlib, which is not installed: pip install matplotlib")
    try:
        runs = [read_run(path) for path in options.runs]
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if len({os.path.basename(os.path.abspath(run.name)) for run in runs}) == len(runs):
        runs = [replace(run, name=os.path.basename(os.path.abspath(run.name))) for run in runs]
    groups, differing = groups_of(runs), differences(runs)
    settings = [[name, *map(str, values)] for name, values in differing.items()]
    headers, titles = ["setting", *(run.name for run in runs)], ["", *groups]
    results, curves = summary_rows(runs, groups), curves_of(runs, groups)
    sys.stdout.write(f"{format_table(headers, settings) if settings else 'all settings are the same'}\n\n")
    sys.stdout.write(f"{format_table(titles, results)}\n")
    sys.stdout.write("mean ± standard deviation over runs that differ in their seed alone\n")
    shown = {
        "groups": list(groups),
        "results": {"headers": titles, "rows": results},
        "charts": [drawn(*curve) for curve in curves],
        "settings": {"headers": headers, "rows": settings},
    }
    written = {options.output: lambda path: write_text_atomic(path, build_page(shown, "compare.js"))}
    if options.csv is not None:
        written[options.csv] = lambda path: write_text_atomic(path, csv_text(curves))
    if options.png is not None:
        written[options.png] = lambda path: draw(path, curves)
    for path, write in written.items():
        try:
            write(path)
        except OSError as error:
            parser.error(f"{path} cannot be written: {error.strerror}")
        sys.stdout.write(f"\n{path}\n")
    return 0
