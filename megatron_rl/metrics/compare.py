"""megatron-rl compare RUN RUN ...: settings in which runs differ, their results, and their curves on one page.

Runs that differ only in their seed are one group, with a mean and a spread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.atomic import write_text_atomic
from megatron_rl.errors import ConfigError
from megatron_rl.metrics.console import format_table
from megatron_rl.metrics.curves import Chart, charts_for, drawn, series_of
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
    """Return label -> indices of the runs that differ in their seed alone."""
    differing = {name: values for name, values in differences(runs).items() if name != "seed"}
    groups: dict[str, list[int]] = {}
    for index in range(len(runs)):
        label = ", ".join(f"{name} {values[index]}" for name, values in differing.items())
        groups.setdefault(label or "all runs", []).append(index)
    return groups


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


def curves_of(runs: Sequence[ComparedRun], groups: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """Return charts of all recorded metrics, in the report's order; each run is a line in its group's colour."""
    color_of = {index: number for number, indices in enumerate(groups.values()) for index in indices}
    curves = []
    for chart in charts_for([row for run in runs for row in run.rows]):
        for metric, label in chart.lines.items() if chart.kind == "line" else ():
            series = (series_of(run.rows, metric, run.name, color_of[index]) for index, run in enumerate(runs))
            lines = [line for line in series if line is not None]
            if lines:
                title = chart.title if len(chart.lines) == 1 else f"{chart.title}: {label}"
                curves.append(drawn(Chart(title, {}, chart.scale), lines))
    return curves


def main(words: Sequence[str] | None = None) -> int:
    """Command line: a table on the screen, and a page."""
    parser = argparse.ArgumentParser(
        prog="megatron-rl compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=named_path, nargs="+", metavar="RUN", help="run directories, two or more")
    parser.add_argument("--output", type=named_path, default=Path("compare.html"), help="the page (compare.html)")
    options = parser.parse_args(words)
    if len(options.runs) < 2:
        parser.error("give two run directories or more")
    try:
        runs = [read_run(path) for path in options.runs]
    except ConfigError as error:
        sys.stderr.writelines(f"{line}\n" for line in error.lines)
        return 2
    groups, differing = groups_of(runs), differences(runs)
    settings = [[name, *map(str, values)] for name, values in differing.items()]
    headers = ["setting", *(run.name for run in runs)]
    counts = {label: "1 run" if len(indices) == 1 else f"{len(indices)} runs" for label, indices in groups.items()}
    titles = ["", *(f"{label} ({count})" for label, count in counts.items())]
    results = summary_rows(runs, groups)
    sys.stdout.write(f"{format_table(headers, settings) if settings else 'all settings are the same'}\n\n")
    sys.stdout.write(f"{format_table(titles, results)}\n")
    sys.stdout.write("mean ± standard deviation over runs that differ in their seed alone\n")
    shown = {
        "groups": list(groups),
        "results": {"headers": titles, "rows": results},
        "charts": curves_of(runs, groups),
        "settings": {"headers": headers, "rows": settings},
    }
    try:
        write_text_atomic(options.output, build_page(shown, "compare.js"))
    except OSError as error:
        parser.error(f"--output {options.output} cannot be written: {error.strerror}")
    sys.stdout.write(f"\n{options.output}\n")
    return 0
