"""Rollout records: what the policy wrote and what it got for it, one JSON line a sequence.

For prompt ``P0 P1`` and answer ``A0 E``::

    {"step": 12, "environment": "arithmetic", "task_id": "7", "sample": 0, "branch": 0,
     "prompt": "<bos>2+2=", "prompt_ids": [P0, P1], "gold": "4",
     "completion": "4", "token_ids": [A0, E], "inference_logprobs": [l2, l3], "token_texts": ["4", "<eos>"],
     "reward": 1.0, "correct": true, "status": "ok", "code": "", ..., "finish_reason": "stop", "policy_version": 11}

The prompt is as the model saw it, special tokens included. ``correct`` is what evaluations count: the verdict, or else
whether the reward is the highest; null where nobody can tell, and where the grade failed.

Records of an evaluation have ``"greedy": true`` or ``false`` besides. Those of training say what became of the sample::

    {"group": 3, "advantage": 0.5, "update": 1, ...}

``update`` counts the optimizer updates of a pass over the rollout from 0; it and ``advantage`` are null for a sample
that is not in the loss. A sample of a harness may have several sequences: a row each, ``branch`` counting them from 0.
Rows above 0 say what their prompt shares with an earlier sequence, and what the model read behind it; ``completion``
has special tokens there::

    {"sample": 0, "branch": 1, "branch_of": 0, "shared_tokens": 7, "read": "<user>try again", ...}

Count samples by the rows of branch 0. With ``--rl-log-rollouts`` at least the step's groups, an update can be computed
again from the records alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from os.path import commonprefix
from pathlib import Path
from typing import Any

from megatron_rl.atomic import write_text_atomic
from megatron_rl.metrics.jsonl import to_plain
from megatron_rl.types import Branch, RolloutGroup, Task

LEFT_OUT = ("routing", "cached_tokens")
"""Fields of completions: large, and another number in each run."""
GRADE_FIELDS = ("correct", "reward", "code", "message", "metrics", "extracted")


def training_rows(
    step: int,
    groups: Sequence[RolloutGroup],
    numbers: Sequence[int],
    use: Mapping[tuple[int, int], Sequence[float]],
    limit: int,
    decode_raw: Callable[[Sequence[int]], str],
) -> list[dict[str, Any]]:
    """Rows of those of this rank's ``groups`` whose number in the step is below ``limit``; JSON values only.

    ``use`` has the update and the advantage (the mean over its tokens) of every rank's sequences that are in the loss,
    by the number of the sample in the whole step and that of the sequence in the sample.
    """
    kept = [(number, group) for number, group in zip(numbers, groups, strict=True) if number < limit]
    by_group = rows_by_group(step, [group for _, group in kept], decode_raw)
    for (number, group), rows in zip(kept, by_group, strict=True):
        for row in rows:
            # Every group of a step has as many samples: this is how the step numbers them.
            sample = number * len(group.rollouts) + row["sample"]
            update, advantage = use.get((sample, row["branch"]), (None, None))
            row |= {"group": number, "advantage": advantage, "update": update}
    return [row for rows in by_group for row in rows]


def rows_by_group(
    step: int, groups: Iterable[RolloutGroup], decode_raw: Callable[[Sequence[int]], str]
) -> list[list[dict[str, Any]]]:
    """A row a sequence: most samples are one.

    ``decode_raw`` gives the text of ids with the special tokens by name: of whole prompts, and of one token at a time,
    so that the report can show its log-prob.
    """
    token_text = cache(lambda token: decode_raw((token,)))
    by_group = []
    for group in groups:
        prompt, gold = decode_raw(group.prompt_ids), gold_answer(group.source.task)
        rows = []
        for index, rollout in enumerate(group.rollouts):
            sequences = group.sequences(rollout)
            for number, (ids, completion) in enumerate((one.prompt_ids, one.completion) for one in sequences):
                rows.append(to_plain({
                    "step": step,
                    "environment": group.source.environment,
                    "task_id": group.source.task.id,
                    "sample": index,
                    "branch": number,
                    "prompt": prompt if ids == group.prompt_ids else decode_raw(ids),
                    "prompt_ids": ids,
                    **_origin(ids, sequences[:number], decode_raw),
                    "gold": gold,
                    "completion": decode_raw(completion.token_ids) if number else rollout.text,
                    **{name: value for name, value in vars(completion).items() if name not in LEFT_OUT},
                    "status": "error" if rollout.grade.failed else "ok",
                    "verdict": rollout.grade.status,
                    **{name: getattr(rollout.grade, name) for name in GRADE_FIELDS},
                    "token_texts": list(map(token_text, completion.token_ids)),
                }))
        by_group.append(rows)
    return by_group


def shared_prompt(ids: Sequence[int], earlier: Sequence[Branch]) -> tuple[int, int]:
    """Which of a sample's ``earlier`` sequences has most of a branch's prompt ``ids``, and how many of its tokens."""
    found = [len(commonprefix([ids, one.prompt_ids + one.completion.token_ids])) for one in earlier]
    return found.index(max(found)), max(found)


def _origin(
    ids: Sequence[int], earlier: Sequence[Branch], decode_raw: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    if not earlier:
        return {}
    number, shared = shared_prompt(ids, earlier)
    return {"branch_of": number, "shared_tokens": shared, "read": decode_raw(ids[shared:])}


def gold_answer(task: Task) -> str | None:
    """The right answer as the environment gives it to its grader: `gold` or else `answer` of the task's data."""
    gold = task.data.get("gold", task.data.get("answer"))
    return gold if gold is None or isinstance(gold, str) else json.dumps(gold)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """One JSON line a row, whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
