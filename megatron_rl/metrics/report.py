"""``report.html``: a run in one self-contained file, without a server or a network.

A run writes it at its end and, from a process of its own, on its way. Rebuild it with::

    python -m megatron_rl.metrics.report RUN_DIR
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from megatron_rl.atomic import write_text_atomic
from megatron_rl.errors import ConfigError
from megatron_rl.metrics.alarms import find_alarms
from megatron_rl.metrics.curves import build_curves, charts_for, line_series, round_number, trained_environments
from megatron_rl.metrics.evaluation import by_environment, last_evaluation, result_table
from megatron_rl.metrics.jsonl import read_json_object, read_steps, to_plain
from megatron_rl.metrics.report_rollouts import build_rollouts
from megatron_rl.metrics.rundir import RunDirectory
from megatron_rl.user_files import named_path

_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
MOST_FIGURES = 4
AVERAGED = 5
"""Steps at either end whose mean stands for the reward at the beginning and now."""


def write_report(run_dir: Path) -> Path:
    """Build ``report.html`` from what the run directory holds; returns its path."""
    run = RunDirectory(run_dir)
    write_text_atomic(run.report, build_page(build_payload(run), "rollouts.js", "report.js"))
    return run.report


def build_payload(run: RunDirectory) -> dict[str, Any]:
    """Collect everything the page shows."""
    rows = read_steps(run.metrics)
    facts, newest = run.read_facts(), last_evaluation(rows)
    headers, results = result_table(newest)
    return {
        "name": os.path.basename(os.path.realpath(run.path)),
        "status": facts.get("status"),
        "error": facts.get("error"),
        "progress": _progress(run, rows),
        "figures": _figures(rows),
        "alarms": [f"step {alarm.step}: {alarm.kind}: {alarm.text}" for alarm in find_alarms(rows)],
        # The same numbers as in ``evaluation.json``, if there is one.
        "evaluation": {"step": newest["step"], "headers": headers, "rows": results} if newest else None,
        "training": _training(rows),
        "charts": build_curves(rows),
        "rollouts": build_rollouts(run.rollouts),
        "replays": _replays(run),
        "facts": _facts(facts, read_json_object(run.summary)),
        "table": _table(rows),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Rebuild the report of a run directory, from the command line."""
    parser = argparse.ArgumentParser(prog="megatron-rl report", description=main.__doc__)
    parser.add_argument("run_dir", type=named_path, help="directory that holds metrics.jsonl")
    run_dir: Path = parser.parse_args(arguments).run_dir
    if not run_dir.is_dir():
        parser.error(f"{run_dir} is not a directory; give the one that holds metrics.jsonl")
    try:
        sys.stdout.write(f"{write_report(run_dir)}\n")
    except OSError as error:
        parser.error(f"the report of {run_dir} cannot be written: {error.strerror}")
    return 0


def _replays(run: RunDirectory) -> dict[str, list[tuple[str, str]]]:
    """Return name and address of each page of `megatron-rl replay` by "step/group"."""
    found: dict[str, list[tuple[str, str]]] = {}
    for path in sorted(run.replays.glob("step_*.html")):
        if match := re.fullmatch(r"step_(\d+)_group_(\d+)(?:_sample_(\d+))?", path.stem):
            step, group, sample = match.groups()
            name = "replay" if sample is None else f"replay of sample {sample}"
            found.setdefault(f"{int(step)}/{group}", []).append((name, f"{run.replays.name}/{path.name}"))
    return found


def _progress(run: RunDirectory, rows: Sequence[Mapping[str, Any]]) -> str:
    """``step 12 of 80, 10:07:31 UTC``: how far the page goes, since it is not kept up to date once it is open."""
    if not rows:
        return ""
    total = None
    with contextlib.suppress(ConfigError):  # the page is of what there is
        total = run.read_settings().get("train_iters")
    newest = rows[-1]
    when = newest.get("time", "")[11:19]
    return f"step {newest['step']}{f' of {total}' if total else ''}{f', {when} UTC' if when else ''}"


def _figures(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Reward or loss in training, then ``("gsm8k pass@1", "0.29 -> 0.98")``: first and newest evaluation."""
    found: dict[str, list[float]] = {}
    for environment, measures in ((name, each) for row in rows for name, each in by_environment(row).items()):
        measure = next((name for name in ("pass@1", "greedy", "reward") if name in measures), None)
        if measure is not None and measures[measure] is not None:
            found.setdefault(f"{environment} {measure}", []).append(measures[measure])
    figures = [(name, _change(values[0], values[-1])) for name, values in found.items()]
    trained = [
        (label, _change(*ends))
        for metric, label in (("critic/rewards/mean", "training reward"), ("train/loss", "loss"))
        if (ends := _ends(rows, metric)) is not None
    ]
    return [*trained, *figures][:MOST_FIGURES]


def _training(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Make a row for each environment that is trained on, and one for all unless there is only one."""
    environments = trained_environments(rows)
    named = {name: (f"reward/{name}/mean", f"reward/{name}/signal_share") for name in environments}
    if len(named) != 1:
        named["all"] = ("critic/rewards/mean", "training/signal_share")
    table = []
    for name, metrics in named.items():
        ends = [_ends(rows, metric) for metric in metrics]
        if any(ends):
            table.append([name, *("-" if pair is None else _change(*pair) for pair in ends)])
    note = f"First and last: means of up to {AVERAGED} steps. A group has variance when its samples differ in reward."
    return {"headers": ["environment", "reward", "share of groups with reward variance"], "rows": table, "note": note}


def _ends(rows: Sequence[Mapping[str, Any]], metric: str) -> tuple[float, float] | None:
    """Average the metric over its first and its last steps, at most half of all each."""
    values = [row[metric] for row in rows if row.get(metric) is not None]
    count = min(AVERAGED, max(1, len(values) // 2))
    return (sum(values[:count]) / count, sum(values[-count:]) / count) if values else None


def _change(first: float, last: float) -> str:
    return f"{last:.3g}" if first == last else f"{first:.3g} \u2192 {last:.3g}"


def _facts(run_facts: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    versions, starts = run_facts.get("versions", {}), len(run_facts.get("starts", []))
    totals = {name: value for name, value in summary.items() if isinstance(value, int | float)}
    facts = {
        "command": shlex.join(run_facts.get("command", [])) or None,
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()) or None,
        "commit": run_facts.get("git_commit"),
        "host": run_facts.get("host"),
        "started": run_facts.get("created"),
        "updated": run_facts.get("updated"),
        "starts": starts if starts > 1 else None,
        **{name.replace("_", " "): value for name, value in totals.items()},
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


def _table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Make a row of first, last, lowest and highest value for every line that is drawn."""
    table = []
    for chart in charts_for(rows):
        for series in line_series(chart, rows):
            finite = [value for value in series.values if value is not None]
            numbers = {"first": finite[0], "last": finite[-1], "lowest": min(finite), "highest": max(finite)}
            rounded = {name: round_number(number) for name, number in numbers.items()}
            table.append({"chart": chart.title, "line": series.label, **rounded})
    return table


def build_page(data: object, *scripts: str) -> str:
    """Build a page that fetches nothing, with ``data`` and the ``scripts`` that show it, run in this order."""
    parts = {
        "__STYLE__": _read("page.css"),
        "__SCRIPT__": "\n".join(_read(name) for name in ("base.js", "charts.js", *scripts)),
        "__REPORT_DATA__": to_script_json(data),  # the last: it may hold any text, these words too
    }
    page = _read("page.html")
    for place, text in parts.items():
        page = page.replace(place, text, 1)
    return page


def to_script_json(value: object) -> str:
    """Write strict JSON that cannot leave its ``<script>`` element: a completion may contain ``</script>``."""
    text = json.dumps(to_plain(value), allow_nan=False, separators=(",", ":"))
    for character, escape in _ESCAPES.items():
        text = text.replace(character, escape)
    return text


def _read(name: str) -> str:
    return (files("megatron_rl.metrics") / "page" / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
