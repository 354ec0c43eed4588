"""The rollouts of a report: a spread of steps, cut to a size a browser opens at once."""

from __future__ import annotations

from collections import Counter
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
    trained, held_out = (spread(sorted(folder.glob(f"{kind}_*.jsonl")), MAX_STEPS) for kind in ("step", "eval"))
    budget = TOKEN_BUDGET // max(1, len(trained) + len(held_out))
    steps = [_build_step(read_rollouts(path), budget, held_out=False) for path in trained]
    steps += [_build_step(read_rollouts(path), budget, held_out=True) for path in held_out]
    return [step for step in steps if step["samples"]]


def spread(items: Sequence[Path], limit: int) -> list[Path]:
    """At most ``limit`` items evenly apart, the first and the last among them."""
    if len(items) <= limit:
        return list(items)
    last = len(items) - 1
    return [items[round(index * last / (limit - 1))] for index in range(limit)]


def _build_step(rows: Sequence[Mapping[str, Any]], budget: int, held_out: bool) -> dict[str, Any]:
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
    return {
        "step": step,
        "held_out": held_out,
        "label": f"held-out, step {step}" if held_out else f"step {step}",
        "recorded": len(rows),
        "verdicts": dict(Counter(verdict for verdict in map(_verdict, rows) if verdict).most_common()),
        "prompts": list(prompts),
        "samples": samples,
    }


def _verdict(row: Mapping[str, Any]) -> str:
    """The grader's word for a sample; "" where it has none, ``not graded`` where the grade failed."""
    return "not graded" if row.get("status") == "error" else str(row.get("verdict") or "")


def _environment_spans(row: Mapping[str, Any], shown: int) -> list[tuple[int, int]]:
    """``[start, end)`` of the tokens that the environment wrote, within the ``shown`` ones."""
    clipped = [(max(0, start), min(end, shown)) for start, end in row.get("environment_spans") or ()]
    return [(start, end) for start, end in clipped if start < end]


def _build_sample(row: Mapping[str, Any]) -> dict[str, Any]:
    token_ids = row.get("token_ids", [])
    texts = row.get("token_texts") or [f"[{token}]" for token in token_ids]
    logprobs = [None if value is None else round(value, 4) for value in row.get("inference_logprobs", [])]
    for start, end in _environment_spans(row, len(logprobs)):
        logprobs[start:end] = [None] * (end - start)  # what stands there was never drawn from the policy
    return {
        "environment": row.get("environment", ""),
        "task": row.get("task_id", ""),
        "sample": row.get("sample", 0),
        "text": _cut(row.get("completion", "")),
        "tokens": texts[:MAX_TOKENS_PER_SAMPLE],
        "logprobs": logprobs[:MAX_TOKENS_PER_SAMPLE],
        "spans": _environment_spans(row, min(len(token_ids), MAX_TOKENS_PER_SAMPLE)),
        "num_tokens": len(token_ids),
        "greedy": row.get("greedy", False),
        "reward": row.get("reward"),
        "verdict": _verdict(row),
        "extracted": row.get("extracted"),
        "status": row.get("status", ""),
        "error": ": ".join(part for part in (row.get("code"), row.get("message")) if part),
        "finish": row.get("finish_reason", ""),
        "version": row.get("policy_version"),
    }


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]} ... ({len(text) - MAX_CHARACTERS} more characters)"
