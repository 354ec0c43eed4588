"""The outcome of `--eval-only`: a table on the screen and ``evaluation.json``."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_rl.metrics.names import split_validation
from megatron_rl.metrics.table import format_table

_SHOWN = (("pass@1", "pass@1 (avg@k)"), ("maj@k", "maj@k"), ("greedy", "greedy"), ("response_length", "tokens"),
          ("truncated", "truncated"), ("num_tasks", "tasks"), ("failed_grades", "failed"))  # fmt: skip


def by_environment(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """``{"gsm8k": {"pass@1": 0.4, "pass@1_ci95": 0.03, ...}}``."""
    found: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        split = split_validation(name)
        if split is not None:
            found.setdefault(split[0], {})[split[1]] = value
    return found


def evaluation_table(metrics: Mapping[str, float], *, unicode: bool = False) -> str:
    """One row an environment; pass@1 with half of its 95 % interval over tasks."""
    results = by_environment(metrics)
    measures = sorted({m for row in results.values() for m in row if m.startswith("pass@") and m[5:].isdigit()}, key=_k)
    shown = [(m, m) for m in measures if m != "pass@1"]
    columns = [_SHOWN[0], *shown, *(pair for pair in _SHOWN[1:] if any(pair[0] in row for row in results.values()))]
    rows = [(name, *(_cell(row, measure) for measure, _ in columns)) for name, row in sorted(results.items())]
    return format_table(("environment", *(title for _, title in columns)), rows, unicode=unicode)


def _k(measure: str) -> int:
    return int(measure.removeprefix("pass@"))


def _cell(row: Mapping[str, float], measure: str) -> str:
    value = row.get(measure)
    if value is None:
        return "-"
    if measure in ("num_tasks", "failed_grades"):
        return f"{value:.0f}"
    if measure == "response_length":
        return f"{value:.1f}"
    half = row.get(f"{measure}_ci95")
    return f"{value:.3f}" if half is None else f"{value:.3f} ± {half:.3f}"
