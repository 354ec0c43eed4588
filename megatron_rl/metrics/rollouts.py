"""Rollout records: what the policy wrote and what it got for it, one JSON line a sample.

For prompt ``P0 P1`` and answer ``A0 E``::

    {"step": 12, "environment": "arithmetic", "task_id": "7", "sample": 0,
     "prompt": "<bos>2+2=", "prompt_ids": [P0, P1], "gold": "4",
     "completion": "4", "token_ids": [A0, E], "inference_logprobs": [l2, l3], "token_texts": ["4", "<eos>"],
     "reward": 1.0, "correct": true, "status": "ok", "code": "", ..., "finish_reason": "stop", "policy_version": 11}

The prompt is as the model saw it, special tokens included. ``correct`` is what evaluations count: the verdict, or else
whether the reward is positive; null where the grade failed.

Records of an evaluation have ``"greedy": true`` or ``false`` besides. Those of training say what became of the sample::

    {"group": 3, "advantage": 0.5, "update": 1, ...}

``update`` counts the optimizer updates of a pass over the rollout from 0; it and ``advantage`` are null for a sample
that is not in the loss. With ``--rl-log-rollouts`` at least the step's groups, an update can be computed again from
the records alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from megatron_rl.atomic import write_text_atomic
from megatron_rl.metrics.evaluation import is_correct
from megatron_rl.metrics.jsonl import to_plain
from megatron_rl.types import RolloutGroup, Task

GRADE_FIELDS = ("reward", "code", "message", "metrics", "extracted")


def training_rows(
    step: int,
    groups: Sequence[RolloutGroup],
    numbers: Sequence[int],
    use: Mapping[int, tuple[int, float]],
    limit: int,
    decode_raw: Callable[[Sequence[int]], str],
) -> list[dict[str, Any]]:
    """Rows of those of this rank's ``groups`` whose number in the step is below ``limit``; JSON values only.

    ``use`` has the update and the advantage (the mean over its tokens) of every rank's samples that are in the loss,
    by their number in the whole step.
    """
    kept = [(number, group) for number, group in zip(numbers, groups, strict=True) if number < limit]
    by_group = rows_by_group(step, [group for _, group in kept], decode_raw)
    for (number, group), rows in zip(kept, by_group, strict=True):
        for row in rows:
            # Every group of a step has as many samples: this is how the step numbers them.
            update, advantage = use.get(number * len(group.rollouts) + row["sample"], (None, None))
            row |= {"group": number, "advantage": advantage, "update": update}
    return [row for rows in by_group for row in rows]


def rows_by_group(
    step: int, groups: Iterable[RolloutGroup], decode_raw: Callable[[Sequence[int]], str]
) -> list[list[dict[str, Any]]]:
    """A row a sample.

    ``decode_raw`` gives the text of ids with the special tokens by name: of whole prompts, and of one token at a time,
    so that the report can show its log-prob.
    """
    token_text = cache(lambda token: decode_raw((token,)))
    rows = []
    for group in groups:
        prompt, gold = decode_raw(group.prompt_ids), gold_answer(group.source.task)
        rows.append([
            to_plain({
                "step": step,
                "environment": group.source.environment,
                "task_id": group.source.task.id,
                "sample": index,
                "prompt": prompt,
                "prompt_ids": group.prompt_ids,
                "gold": gold,
                "completion": rollout.text,
                **{name: value for name, value in vars(rollout.completion).items() if name != "routing"},
                "status": "error" if rollout.grade.failed else "ok",
                "verdict": rollout.grade.status,
                "correct": None if rollout.grade.failed else is_correct(rollout.grade),
                **{name: getattr(rollout.grade, name) for name in GRADE_FIELDS},
                "token_texts": list(map(token_text, rollout.completion.token_ids)),
            })
            for index, rollout in enumerate(group.rollouts)
        ])
    return rows


def gold_answer(task: Task) -> str | None:
    """The right answer as the environment gives it to its grader: `gold` or else `answer` of the task's data."""
    gold = task.data.get("gold", task.data.get("answer"))
    return gold if gold is None or isinstance(gold, str) else json.dumps(gold)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """One JSON line a row, whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
