"""``summary.json``: the numbers one asks for first."""

from __future__ import annotations

from typing import Any

from megatron_rl.metrics.evaluation import by_environment, split_validation
from megatron_rl.metrics.jsonl import read_rows
from megatron_rl.quantization.rollout import RolloutQuantization
from megatron_rl.run.base import Run


def summarise(run: Run, quantization: RolloutQuantization, status: str) -> dict[str, Any]:
    """Held-out results before and after, seconds by phase, tokens and the largest log-prob gap.

    ``eval`` is the mean over environments; ``eval_by_environment`` has each of them.
    """
    if not run.groups.is_main:
        return {}
    rows = read_rows(run.directory.metrics)
    evaluated = [row for row in rows if any(split_validation(name) for name in row)]
    summary: dict[str, Any] = {
        "status": status,
        "steps": run.progress.step,
        "updates": run.progress.updates,
        "tokens": run.progress.tokens,
        "logprob_gap_max": run.progress.logprob_gap_max,
        "seconds": {"run": run.reporter.seconds, "by_phase": _seconds_by_phase(rows)},
        "world_size": run.groups.world_size,
        "rollout_quantization": {"recipe": quantization.recipe, "bytes": quantization.stored_bytes},
    }
    attention = run.policy.attention
    summary["attention"] = {
        "packed": attention.packed_name,
        "cache": attention.cache_name,
        "kv_cache_dtype": run.config.kv_cache_dtype,
    }
    if evaluated:
        before, after = by_environment(evaluated[0]), by_environment(evaluated[-1])
        summary["eval"] = {"before": _mean(before), "after": _mean(after)}
        summary["eval_by_environment"] = {"before": before, "after": after}
    return summary


def _mean(by_environment: dict[str, dict[str, float]]) -> dict[str, float]:
    """Mean of every measure over the environments that report it."""
    columns: dict[str, list[float]] = {}
    for measures in by_environment.values():
        for name, value in measures.items():
            columns.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in columns.items()}


def _seconds_by_phase(rows: list[dict[str, Any]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("timing_s/") and value is not None:
                phase = name.removeprefix("timing_s/")
                totals[phase] = totals.get(phase, 0.0) + value
    return totals
