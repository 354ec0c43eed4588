"""The rollouts of a report: a spread of steps, cut to a size a browser opens at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.metrics.rollouts import read_rollouts

MAX_STEPS = 40
MAX_TOKENS_PER_SAMPLE = 2_000
MAX_CHARACTERS = 12_000
TOKEN_BUDGET = 300_000
"""About 6 MB of page."""


def build_rollouts(folder: Path) -> list[dict[str, Any]]:
    """One entry a step: its prompts once, and the samples that refer to them."""
    paths = spread(sorted(folder.glob("step_*.jsonl")), MAX_STEPS)
    budget = TOKEN_BUDGET // max(1, len(paths))
    steps = [_build_step(read_rollouts(path), budget) for path in paths]
    return [step for step in steps if step["samples"]]


def spread(items: Sequence[Path], limit: int) -> list[Path]:
    """At most ``limit`` items evenly apart, the first and the last among them."""
    if len(items) <= limit:
        return list(items)
    last = len(items) - 1
    return [items[round(index * last / (limit - 1))] for index in range(limit)]


def _build_step(rows: Sequence[Mapping[str, Any]], budget: int) -> dict[str, Any]:
    """The first samples, group by group, until the token budget is used; at least one."""
    prompts: dict[str, int] = {}
    samples: list[dict[str, Any]] = []
    used = 0
    for row in rows:
        tokens = min(len(row.get("token_ids", ())), MAX_TOKENS_PER_SAMPLE)
        if samples and used + tokens > budget:
            break
        used += tokens
        prompt = prompts.setdefault(_cut(row.get("prompt", "")), len(prompts))
        samples.append({"prompt": prompt, **_build_sample(row)})
    step = rows[0]["step"] if rows else 0
    return {"step": step, "recorded": len(rows), "prompts": list(prompts), "samples": samples}


def _build_sample(row: Mapping[str, Any]) -> dict[str, Any]:
    token_ids = row.get("token_ids", [])
    texts = row.get("token_texts") or [f"[{token}]" for token in token_ids]
    logprobs = row.get("inference_logprobs", [])[:MAX_TOKENS_PER_SAMPLE]
    return {
        "environment": row.get("environment", ""),
        "task": row.get("task_id", ""),
        "sample": row.get("sample", 0),
        "text": _cut(row.get("completion", "")),
        "tokens": texts[:MAX_TOKENS_PER_SAMPLE],
        "logprobs": [None if value is None else round(value, 4) for value in logprobs],
        "num_tokens": len(token_ids),
        "reward": row.get("reward"),
        "status": row.get("status", ""),
        "error": ": ".join(part for part in (row.get("code"), row.get("message")) if part),
        "finish": row.get("finish_reason", ""),
        "version": row.get("policy_version"),
    }


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]} ... ({len(text) - MAX_CHARACTERS} more characters)"
