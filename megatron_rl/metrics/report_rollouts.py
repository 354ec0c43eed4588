"""The rollouts of a report: some steps of a run, some groups of a step, small enough for a browser to open.

What it costs does not grow with the run: the number of steps is bounded, and a file is read as far as it is shown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_STEPS, FEWEST_STEPS = 40, 4
MAX_TOKENS_PER_SAMPLE = 2_000
MAX_CHARACTERS = 12_000
TOKEN_BUDGET = 300_000
"""About 6 MB of page."""
BYTE_BUDGET = 2**26
"""Of long answers a file may have tens of MB; then fewer steps are shown, with more of each."""
SHOWN_AS_RECORDED = ("reward", "extracted", "finish_reason", "policy_version")
SAME = ("completion", "finish_reason", "reward", "verdict", "extracted", "greedy")
"""Samples of a group that differ in none of these are shown once."""

Row = Mapping[str, Any]


def build_rollouts(folder: Path) -> list[dict[str, Any]]:
    """One entry a step, of training and then of evaluations, with its groups."""
    paths = [path for kind in ("step", "eval") for path in _shown(sorted(folder.glob(f"{kind}_*.jsonl")))]
    budget = TOKEN_BUDGET // max(1, len(paths))
    steps = [_build_step(path, budget) for path in paths]
    return [step for step in steps if step is not None]


def _shown(paths: Sequence[Path]) -> list[Path]:
    largest = max((path.stat().st_size for path in paths), default=0)
    return spread(paths, max(FEWEST_STEPS, min(MAX_STEPS, BYTE_BUDGET // max(1, largest))))


def spread(items: Sequence[Path], limit: int) -> list[Path]:
    """At most ``limit`` items evenly apart, the first and the last among them."""
    count = min(len(items), limit)
    return [items[round(index * (len(items) - 1) / max(1, count - 1))] for index in range(count)]


def _build_step(path: Path, budget: int) -> dict[str, Any] | None:
    rows, recorded = read_groups(path, budget)
    if not rows:
        return None
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(_group_of(row), []).append(row)
    step, held_out = rows[0]["step"], path.name.startswith("eval")
    return {
        "step": step,
        "held_out": held_out,
        "label": f"held-out, step {step}" if held_out else f"step {step}",
        "recorded": recorded,
        "groups": [_build_group(of_group) for of_group in groups.values()],
    }


def read_groups(path: Path, budget: int) -> tuple[list[dict[str, Any]], int]:
    """Rows of the first whole groups with ``budget`` tokens to show, at least one group; and the number of all rows.

    Lines that are no rows are left out: a file may have been cut by a full disk. The rows after the budget are
    counted and not read.
    """
    rows: list[dict[str, Any]] = []
    used = recorded = 0
    full = False
    with path.open("rb") as file:
        for line in file:
            recorded += 1
            if full:
                continue
            try:
                row = json.loads(line)
                tokens = min(len(row["token_ids"]), MAX_TOKENS_PER_SAMPLE)
            except (ValueError, KeyError, TypeError):
                recorded -= 1
                continue
            full = used >= budget and _group_of(row) != _group_of(rows[-1])
            if not full:
                used += tokens
                rows.append(row)
    return rows, recorded


def _group_of(row: Row) -> tuple[Any, ...]:
    """The answers to a held-out task, sampled and greedy, are one group."""
    return row.get("group"), row["environment"], row["task_id"], row["prompt"]


def _build_group(rows: Sequence[Row]) -> dict[str, Any]:
    """The prompt, what the group was worth, and its samples, identical answers once.

    Mean and counts are of the sampled answers, without the greedy one, where there are any.
    """
    sampled = [row for row in rows if not row.get("greedy")] or rows
    rewards = [row["reward"] for row in sampled if row["reward"] is not None]
    same: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        same.setdefault(tuple(map(row.get, SAME)), []).append(row)
    first = rows[0]
    return {
        "environment": first["environment"],
        "task": first["task_id"],
        "gold": first.get("gold"),
        "prompt": _cut(first["prompt"]),
        "count": len(sampled),
        "mean": sum(rewards) / len(rewards) if rewards else None,
        "equal": len(rewards) > 1 and len(set(rewards)) == 1,
        "correct": sum(bool(_correct(row)) for row in sampled),
        "truncated": sum(row["finish_reason"] == "length" for row in sampled),
        "samples": [
            {**_build_sample(identical[0]), "samples": [row["sample"] for row in identical]}
            for identical in same.values()
        ],
    }


def _correct(row: Row) -> bool | None:
    """None where the grade failed. Runs before ``correct`` was recorded go by the reward."""
    if row["reward"] is None:
        return None
    return row.get("correct", row["reward"] > 0)


def _build_sample(row: Row) -> dict[str, Any]:
    """What the page shows of a record, under the record's own names where it is shown as it is."""
    tokens = row["token_texts"][:MAX_TOKENS_PER_SAMPLE]
    logprobs = [None if value is None else round(value, 4) for value in row["inference_logprobs"][: len(tokens)]]
    clipped = [(start, min(end, len(tokens))) for start, end in row["environment_spans"]]
    spans = [(start, end) for start, end in clipped if start < end]
    for start, end in spans:
        logprobs[start:end] = [None] * (end - start)  # what stands there was never drawn from the policy
    correct = _correct(row)
    by_reward = correct is not None and not row["verdict"]
    verdict = "not graded" if correct is None else row["verdict"] or ("correct" if correct else "wrong")
    return {
        **{name: row[name] for name in SHOWN_AS_RECORDED},
        "completion": _cut(row["completion"]),
        "tokens": tokens,
        "logprobs": logprobs,
        "spans": spans,
        "num_tokens": len(row["token_ids"]),
        "greedy": row.get("greedy", False),
        "advantage": row.get("advantage"),
        "correct": correct,
        "verdict": verdict,
        "by_reward": by_reward,
        "error": ": ".join(filter(None, (row["code"], row["message"]))),
    }


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]} ... ({len(text) - MAX_CHARACTERS} more characters)"
