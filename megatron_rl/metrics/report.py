"""``report.html``: a run in one self-contained file, without a server or a network.

Rebuild it with::

    python -m megatron_rl.metrics.report RUN_DIR
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from megatron_rl.atomic import write_text_atomic
from megatron_rl.metrics.curves import build_curves, charts_for, line_series, round_number
from megatron_rl.metrics.evaluation import last_evaluation, result_table
from megatron_rl.metrics.files import to_plain
from megatron_rl.metrics.jsonl import read_rows
from megatron_rl.metrics.report_rollouts import build_rollouts
from megatron_rl.metrics.rundir import RunDirectory, read_json_object

TEMPLATE = "report_template.html"
PLACEHOLDER = "__REPORT_DATA__"
HTML_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def write_report(run_dir: Path) -> Path:
    """Build ``report.html`` from what the run directory holds; returns its path."""
    run = RunDirectory(run_dir)
    template = files("megatron_rl.metrics").joinpath(TEMPLATE).read_text(encoding="utf-8")
    page = template.replace(PLACEHOLDER, to_script_json(build_payload(run)), 1)
    write_text_atomic(run.report, page)
    return run.report


def build_payload(run: RunDirectory) -> dict[str, Any]:
    """Everything the page shows."""
    rows = _merge_by_step(read_rows(run.metrics))
    return {
        "name": run.path.resolve().name,
        "facts": _facts(run.read_facts(), rows),
        "summary": _evaluation_figures(read_json_object(run.summary)),
        "table": _table(rows),
        "evaluation": _evaluation(rows),
        "charts": build_curves(rows),
        "rollouts": build_rollouts(run.rollouts),
    }


def _evaluation_figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The summary with "pass@1: 0.29 -> 0.98" in place of the nested evaluations."""
    results = summary.get("eval") or {}
    before, after = results.get("before", {}), results.get("after", {})
    changes = {
        f"held-out {measure}": f"{before[measure]:.3g} \u2192 {after[measure]:.3g}"
        for measure in after
        if measure in before and (measure.startswith("pass@") or measure == "greedy")
    }
    return {**changes, **{name: value for name, value in summary.items() if name != "eval"}}


def _evaluation(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The newest results by environment; the same numbers as in ``evaluation.json``, if there is one."""
    newest = last_evaluation(rows)
    if not newest:
        return None
    table = result_table(newest)
    return {"step": newest["step"], "headers": table.headers, "rows": table.rows}


def to_script_json(value: object) -> str:
    """Strict JSON that cannot leave the ``<script>`` element it is put in.

    Completions are written by a model under training: one of them will contain ``</script>`` or ``<!--``.
    ``json`` itself escapes everything outside ASCII, the line separators U+2028 and U+2029 included.
    """
    text = json.dumps(to_plain(value), allow_nan=False, separators=(",", ":"))
    for character, escape in HTML_ESCAPES.items():
        text = text.replace(character, escape)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: rebuild the report of a run directory."""
    parser = argparse.ArgumentParser(prog="python -m megatron_rl.metrics.report", description=main.__doc__)
    parser.add_argument("run_dir", type=Path, help="directory that holds metrics.jsonl")
    run_dir: Path = parser.parse_args(arguments).run_dir
    if not run_dir.is_dir():
        parser.error(f"{run_dir} is not a directory; give the one that holds metrics.jsonl")
    sys.stdout.write(f"{write_report(run_dir)}\n")
    return 0


def _merge_by_step(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ascending steps, each once; a file edited or joined by hand may hold a step twice."""
    merged: dict[int, dict[str, Any]] = {}
    for row in rows:
        merged.setdefault(row["step"], {}).update(row)
    return [merged[step] for step in sorted(merged)]


def _facts(run_facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    versions, starts = run_facts.get("versions", {}), len(run_facts.get("starts", []))
    facts = {
        "status": run_facts.get("status"),
        "last step": rows[-1]["step"] if rows else None,
        "started": run_facts.get("created"),
        "updated": run_facts.get("updated"),
        "starts": starts if starts > 1 else None,
        "host": run_facts.get("host"),
        "commit": run_facts.get("git_commit"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()) or None,
        "command": shlex.join(run_facts.get("command", [])) or None,
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


def _table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """First, last, lowest and highest value of every line that is drawn."""
    table = []
    for chart in charts_for(rows):
        for series in line_series(chart, rows):
            finite = [value for value in series.values if value is not None]
            numbers = {"first": finite[0], "last": finite[-1], "lowest": min(finite), "highest": max(finite)}
            rounded = {name: round_number(number) for name, number in numbers.items()}
            table.append({"chart": chart.title, "line": series.label, **rounded})
    return table


if __name__ == "__main__":
    sys.exit(main())
