"""pass@k, and the results of an evaluation by environment: on the screen, in the report and in ``evaluation.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

COUNTS = frozenset({"num_tasks", "failed_grades", "pass@1_ci95"})
"""Measures that are counts and intervals, not results: kept in the files, not drawn."""
_AFTER_PASS_AT_K = (("maj@k", "maj@k"), ("greedy", "greedy"), ("reward", "reward"), ("response_length", "tokens"),
                    ("truncated", "truncated"), ("num_tasks", "tasks"), ("failed_grades", "failed"))  # fmt: skip


def pass_at_k(num_samples: ArrayLike, num_correct: ArrayLike, k: int) -> NDArray[np.float64]:
    """Estimate the chance that one of ``k`` answers is right, fp64, from n >= k answers of which c are.

    ``1 - C(n - c, k) / C(n, k)``, the unbiased estimate of Chen et al., arXiv 2107.03374, eq. 1, as the product of
    ``(n - c - i) / (n - i)`` over i < k: the binomials overflow fp64 at n = 1030. n and c are numbers or one per task.
    """
    import numpy as np  # a command that only finds a misspelt flag does not wait for it

    samples, wrong = np.asarray(num_samples), np.subtract(num_samples, num_correct)
    drawn = np.arange(k)
    # With fewer than k wrong answers one factor is exactly 0, and so is the chance of missing.
    return 1.0 - np.prod((wrong[..., None] - drawn) / (samples[..., None] - drawn), axis=-1)


def by_environment(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Group an evaluation's metrics, ``val/gsm8k/pass@1``: ``{"gsm8k": {"pass@1": 0.4, "pass@1_ci95": 0.03, ...}}``."""
    found: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        if name.startswith("val/"):
            environment, _, measure = name.removeprefix("val/").rpartition("/")
            found.setdefault(environment, {})[measure] = value
    return found


def with_average(results: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return the same with ``avg@k`` beside ``pass@1``, its other name: the mean share of k samples that are right."""
    return {name: {**row, **({"avg@k": row["pass@1"]} if "pass@1" in row else {})} for name, row in results.items()}


def result_table(*evaluations: Mapping[str, float]) -> tuple[list[str], list[list[str]]]:
    """Make the headers, and one row per environment, its name first; of several ``evaluations`` their steps before it.

    pass@k in ascending k, pass@1 with half of its 95 % interval over tasks, and what else was measured.
    """
    results = [
        (name, metrics.get("step"), row) for metrics in evaluations for name, row in by_environment(metrics).items()
    ]
    ks = sorted({k for *_, row in results for k in map(_k, row) if k is not None})
    shown = [(f"pass@{k}", "pass@1 = avg@k" if k == 1 else f"pass@{k}") for k in ks]
    shown += [pair for pair in _AFTER_PASS_AT_K if any(pair[0] in row for *_, row in results)]
    results.sort(key=lambda result: result[0])  # the steps of an environment one below the other
    several = len(evaluations) > 1
    rows = [
        [*([str(step)] if several else []), name, *(_cell(row, measure) for measure, _ in shown)]
        for name, step, row in results
    ]
    return [*(["step"] if several else []), "environment", *(title for _, title in shown)], rows


def last_evaluation(rows: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """Return the last row of metrics that holds an evaluation; empty when there is none."""
    return next((row for row in reversed(rows) if by_environment(row)), {})


def _k(measure: str) -> int | None:
    digits = measure.removeprefix("pass@")
    return int(digits) if digits != measure and digits.isdigit() else None


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
