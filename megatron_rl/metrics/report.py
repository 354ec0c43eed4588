"""``report.html``: a run in one self-contained file, without a server or a network.

Rebuild it with::

    python -m megatron_rl.metrics.report RUN_DIR
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from megatron_rl.atomic import write_text_atomic
from megatron_rl.metrics.curves import build_curves, charts_for, line_series, round_number
from megatron_rl.metrics.evaluation import last_evaluation, result_table
from megatron_rl.metrics.jsonl import read_json_object, read_rows, to_plain
from megatron_rl.metrics.rundir import RunDirectory

TEMPLATE = "report_template.html"
PLACEHOLDER = "__REPORT_DATA__"
HTML_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}

MAX_STEPS = 40
MAX_TOKENS_PER_SAMPLE = 2_000
MAX_CHARACTERS = 12_000
TOKEN_BUDGET = 300_000
"""About 6 MB of page."""
SHOWN_AS_RECORDED = ("environment", "task_id", "sample", "reward", "extracted", "finish_reason", "policy_version")


def write_report(run_dir: Path) -> Path:
    """Build ``report.html`` from what the run directory holds; returns its path."""
    run = RunDirectory(run_dir)
    template = files("megatron_rl.metrics").joinpath(TEMPLATE).read_text(encoding="utf-8")
    page = template.replace(PLACEHOLDER, to_script_json(build_payload(run)), 1)
    write_text_atomic(run.report, page)
    return run.report


def build_payload(run: RunDirectory) -> dict[str, Any]:
    """Everything the page shows."""
    merged: dict[int, dict[str, Any]] = {}
    for row in read_rows(run.metrics):  # a file edited or joined by hand may hold a step twice
        merged.setdefault(row["step"], {}).update(row)
    rows = [merged[step] for step in sorted(merged)]
    newest = last_evaluation(rows)
    headers, results = result_table(newest)
    return {
        "name": run.path.resolve().name,
        "facts": _facts(run.read_facts(), rows),
        "summary": _evaluation_figures(read_json_object(run.summary)),
        "table": _table(rows),
        # The same numbers as in ``evaluation.json``, if there is one.
        "evaluation": {"step": newest["step"], "headers": headers, "rows": results} if newest else None,
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


def build_rollouts(folder: Path) -> list[dict[str, Any]]:
    """One entry a step: its prompts once, and the samples that refer to them."""
    paths = [path for kind in ("step", "eval") for path in spread(sorted(folder.glob(f"{kind}_*.jsonl")), MAX_STEPS)]
    budget = TOKEN_BUDGET // max(1, len(paths))
    recorded = [(path.name.startswith("eval"), read_rows(path)) for path in paths]
    return [_build_step(rows, budget, held_out) for held_out, rows in recorded if rows]


def spread(items: Sequence[Path], limit: int) -> list[Path]:
    """At most ``limit`` items evenly apart, the first and the last among them."""
    count = min(len(items), limit)
    return [items[round(index * (len(items) - 1) / max(1, count - 1))] for index in range(count)]


def _build_step(rows: Sequence[Mapping[str, Any]], budget: int, held_out: bool) -> dict[str, Any]:
    """The first samples, group by group, until the token budget is used; at least one."""
    prompts: dict[str, int] = {}
    samples: list[dict[str, Any]] = []
    used = 0
    for row in rows:
        tokens = min(len(row["token_ids"]), MAX_TOKENS_PER_SAMPLE)
        if samples and used + tokens > budget:
            break
        used += tokens
        prompt = prompts.setdefault(_cut(row["prompt"]), len(prompts))
        samples.append({"prompt": prompt, **_build_sample(row)})
    step = rows[0]["step"]
    return {
        "step": step,
        "held_out": held_out,
        "label": f"held-out, step {step}" if held_out else f"step {step}",
        "recorded": len(rows),
        "verdicts": dict(Counter(filter(None, map(_verdict, rows))).most_common()),
        "prompts": list(prompts),
        "samples": samples,
    }


def _verdict(row: Mapping[str, Any]) -> str:
    """The grader's word for a sample; "" where it has none, ``not graded`` where the grade failed."""
    return "not graded" if row["status"] == "error" else row["verdict"]


def _build_sample(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of a record, under the record's own names where it is shown as it is."""
    tokens = row["token_texts"][:MAX_TOKENS_PER_SAMPLE]
    logprobs = [None if value is None else round(value, 4) for value in row["inference_logprobs"][: len(tokens)]]
    clipped = [(start, min(end, len(tokens))) for start, end in row["environment_spans"]]
    spans = [(start, end) for start, end in clipped if start < end]
    for start, end in spans:
        logprobs[start:end] = [None] * (end - start)  # what stands there was never drawn from the policy
    return {
        **{name: row[name] for name in SHOWN_AS_RECORDED},
        "completion": _cut(row["completion"]),
        "tokens": tokens,
        "logprobs": logprobs,
        "spans": spans,
        "num_tokens": len(row["token_ids"]),
        "greedy": row.get("greedy", False),
        "verdict": _verdict(row),
        "error": ": ".join(filter(None, (row["code"], row["message"]))),
    }


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]} ... ({len(text) - MAX_CHARACTERS} more characters)"


if __name__ == "__main__":
    sys.exit(main())
