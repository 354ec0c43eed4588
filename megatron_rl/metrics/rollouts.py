"""Rollout records: what the policy wrote and what it got for it, one JSON line a sample.

For prompt ``P0 P1`` and answer ``A0 E``::

    {"step": 12, "environment": "arithmetic", "task_id": "7", "sample": 0, "prompt": "...", "prompt_ids": [P0, P1],
     "completion": "...", "token_ids": [A0, E], "inference_logprobs": [l2, l3], "token_texts": ["4", "<eos>"],
     "reward": 1.0, "status": "ok", "code": "", ..., "finish_reason": "stop", "policy_version": 11}

Records of an evaluation have ``"greedy": true`` or ``false`` besides. Those of training say what became of the sample::

    {"group": 3, "advantage": 0.5, "update": 1, ...}

``update`` counts the optimizer updates of a pass over the rollout from 0; it and ``advantage`` are null for a sample
that is not in the loss. With ``--rl-log-rollouts`` at least the step's groups, an update can be computed again from
the records alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from megatron_rl.atomic import write_text_atomic
from megatron_rl.metrics.jsonl import to_plain
from megatron_rl.types import Rollout, RolloutGroup


def training_rows(
    step: int,
    groups: Sequence[RolloutGroup],
    numbers: Sequence[int],
    use: Mapping[int, tuple[int, float]],
    limit: int,
    decode_token: Callable[[int], str],
) -> list[dict[str, Any]]:
    """Rows of those of this rank's ``groups`` whose number in the step is below ``limit``; JSON values only.

    ``use`` has the update and the advantage (the mean over its tokens) of every rank's samples that are in the loss,
    by their number in the whole step.
    """
    kept = [(number, group) for number, group in zip(numbers, groups, strict=True) if number < limit]
    rows = list(_rows(step, [group for _, group in kept], cache(decode_token), None))
    places = [(number, index) for number, group in kept for index in range(len(group.rollouts))]
    for row, (number, index) in zip(rows, places, strict=True):
        # Every group of a step has as many samples: this is how the step numbers them.
        update, advantage = use.get(number * len(groups[0].rollouts) + index, (None, None))
        row |= {"group": number, "advantage": advantage, "update": update}
    return rows


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """One JSON line a row, whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))


def write_rollouts(
    path: Path,
    step: int,
    groups: Sequence[RolloutGroup],
    *,
    decode_token: Callable[[int], str] | None = None,
    greedy: Sequence[bool] | None = None,
) -> None:
    """Write the samples of ``groups``, whole file or nothing.

    ``decode_token`` gives the text of one token id; with it the report can show each token's log-prob.
    ``greedy`` says of each group of an evaluation whether it is the greedy answer.
    """
    decode = None if decode_token is None else cache(decode_token)
    write_rows(path, _rows(step, groups, decode, greedy))


def _rows(
    step: int,
    groups: Sequence[RolloutGroup],
    decode: Callable[[int], str] | None,
    greedy: Sequence[bool] | None,
) -> Iterator[dict[str, Any]]:
    for number, group in enumerate(groups):
        for index, rollout in enumerate(group.rollouts):
            row = {
                "step": step,
                "environment": group.source.environment,
                "task_id": group.source.task.id,
                "sample": index,
                "prompt": group.prompt_text,
                "prompt_ids": group.prompt_ids,
                **_answer(rollout),
            }
            if greedy is not None:
                row["greedy"] = greedy[number]
            if decode is not None:
                row["token_texts"] = [decode(token) for token in rollout.completion.token_ids]
            yield to_plain(row)


def _answer(rollout: Rollout) -> dict[str, Any]:
    completion, grade = rollout.completion, rollout.grade
    return {
        "completion": rollout.text,
        "token_ids": completion.token_ids,
        "inference_logprobs": completion.inference_logprobs,
        "environment_spans": completion.environment_spans,
        "finish_reason": completion.finish_reason,
        "policy_version": completion.policy_version,
        "reward": grade.reward,
        "status": grade.status,
        "code": grade.code,
        "verdict": grade.verdict,
        "extracted": grade.extracted,
        "message": grade.message,
        "metrics": grade.metrics,
    }
