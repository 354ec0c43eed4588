"""The rollouts of a report: some steps of a run and some groups of a step, small enough for a browser to open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.json_text import parse_json

MAX_STEPS, FEWEST_STEPS = 40, 4
MAX_TOKENS_PER_SAMPLE = 2_000
MAX_CHARACTERS = 12_000
TOKEN_BUDGET = 300_000
"""About 6 MB of page."""
BYTE_BUDGET = 2**26
"""Of long answers a file may have tens of MB; then fewer steps are shown, with more of each."""
BRANCH = b'"branch": '
"""Before the number of a sequence in a record's line; older records have none."""
SAME = ("completion", "finish_reason", "reward", "verdict", "extracted", "greedy", "agent", "agent_reward")
"""Samples of a group that differ in none of these are shown once."""

Row = Mapping[str, Any]


def build_rollouts(folder: Path) -> list[dict[str, Any]]:
    """Return one entry for each step, of training and then of evaluations, with its groups."""
    paths = [path for kind in ("step", "eval") for path in _shown(sorted(folder.glob(f"{kind}_*.jsonl")))]
    budget = TOKEN_BUDGET // max(1, len(paths))
    steps = [_build_step(path, budget) for path in paths]
    return [step for step in steps if step is not None]


def _shown(paths: Sequence[Path]) -> list[Path]:
    largest = max((path.stat().st_size for path in paths), default=0)
    return spread(paths, max(FEWEST_STEPS, min(MAX_STEPS, BYTE_BUDGET // max(1, largest))))


def spread(items: Sequence[Path], limit: int) -> list[Path]:
    """Choose at most ``limit`` items evenly apart, the first and the last among them."""
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
        "groups": [build_group(of_group) for of_group in groups.values()],
    }


def read_groups(path: Path, budget: int) -> tuple[list[dict[str, Any]], int]:
    """Read the first whole groups within ``budget`` tokens, at least one: their rows, and the number of all samples.

    Damaged lines are left out. Rows after the budget are counted and not parsed.
    """
    rows: list[dict[str, Any]] = []
    used = recorded = 0
    full = False
    with path.open("rb") as file:
        for line in file:
            begins = _begins_a_sample(line)
            recorded += begins
            if full:
                continue
            try:
                row = parse_json(line)
                tokens = min(len(row["token_ids"]), MAX_TOKENS_PER_SAMPLE)
            except (ValueError, KeyError, TypeError):
                recorded -= begins
                continue
            full = used >= budget and _group_of(row) != _group_of(rows[-1])
            if not full:
                used += tokens
                rows.append(row)
    return rows, recorded


def _begins_a_sample(line: bytes) -> bool:
    """Tell, without parsing the line, whether it is the first sequence of a sample."""
    place = line.find(BRANCH)
    return place < 0 or line[place + len(BRANCH) :].startswith(b"0")


def _group_of(row: Row) -> tuple[Any, ...]:
    """Sampled and greedy answers to a held-out task are one group."""
    return row.get("group"), row["environment"], row["task_id"]


def build_group(rows: Sequence[Row]) -> dict[str, Any]:
    """Make a group's entry, identical answers once; mean and counts leave the greedy answer out."""
    samples: list[list[Row]] = []
    for row in rows:
        if row.get("branch"):  # it follows its sample's first sequence
            samples[-1].append(row)
        else:
            samples.append([row])
    sampled = [sample for sample in samples if not sample[0].get("greedy")] or samples
    rewards = [row["reward"] for row, *_ in sampled if row["reward"] is not None]
    verdicts = [row.get("correct") for row, *_ in sampled]
    same: dict[tuple[Any, ...], list[list[Row]]] = {}
    for sample in samples:
        same.setdefault(tuple(row.get(name) for row in sample for name in SAME), []).append(sample)
    first = rows[0]
    return {
        "number": first.get("group"),
        "environment": first["environment"],
        "task": first["task_id"],
        "gold": first.get("gold"),
        "prompt": _cut(first["prompt"]),
        "count": len(sampled),
        "mean": sum(rewards) / len(rewards) if rewards else None,
        "equal": len(rewards) > 1 and len(set(rewards)) == 1,
        "correct": None if set(verdicts) <= {None} else sum(map(bool, verdicts)),
        "truncated": sum(any(row["finish_reason"] == "length" for row in sample) for sample in sampled),
        "samples": [
            {**_build_sample(identical[0], first["prompt"]), "samples": [row["sample"] for row, *_ in identical]}
            for identical in same.values()
        ],
    }


def _build_sample(rows: Sequence[Row], prompt: str) -> dict[str, Any]:
    """Make the entry of a sample's sequences; with its own prompt only where it is not that of the group."""
    row, *branches = rows
    correct = row.get("correct")
    word = "not graded" if row["reward"] is None else {True: "correct", False: "wrong", None: "graded"}[correct]
    return {
        **_build_sequence(row),
        "prompt": None if row["prompt"] == prompt else _cut(row["prompt"]),
        "reward": row["reward"],
        "extracted": row["extracted"],
        "greedy": row.get("greedy", False),
        "correct": correct,
        "verdict": row["verdict"] or word,
        "by_reward": correct is not None and not row["verdict"],
        "error": ": ".join(filter(None, (row["code"], row["message"]))),
        "branches": [
            {
                **_build_sequence(branch),
                "number": branch["branch"],
                "of": branch["branch_of"],
                "shared": branch["shared_tokens"],
                "read": _cut(branch["read"]),
            }
            for branch in branches
        ],
    }


def _build_sequence(row: Row) -> dict[str, Any]:
    tokens = row["token_texts"][:MAX_TOKENS_PER_SAMPLE]
    logprobs = [None if value is None else round(value, 4) for value in row["inference_logprobs"][: len(tokens)]]
    clipped = [(start, min(end, len(tokens))) for start, end in row["environment_spans"]]
    spans = [(start, end) for start, end in clipped if start < end]
    for start, end in spans:
        logprobs[start:end] = [None] * (end - start)  # what stands there was never drawn from the policy
    return {
        "finish_reason": row["finish_reason"],
        "policy_version": row["policy_version"],
        "completion": _cut(row["completion"]),
        "tokens": tokens,
        "logprobs": logprobs,
        "spans": spans,
        "num_tokens": len(row["token_ids"]),
        "advantage": row.get("advantage"),
        **{name: row[name] for name in ("agent", "agent_reward") if name in row},
    }


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]} ... ({len(text) - MAX_CHARACTERS} more characters)"
