"""Rollout records of groups made by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_rl.metrics.rollouts import rows_by_group, write_rows
from megatron_rl.types import RolloutGroup


def write_rollouts(
    path: Path,
    step: int,
    groups: Sequence[RolloutGroup],
    decode_raw: Callable[[Sequence[int]], str] = lambda ids: "".join(f"[{token}]" for token in ids),
    greedy: Sequence[bool] | None = None,
) -> None:
    """All samples of ``groups``; ``greedy`` says of each group of an evaluation whether it is the greedy answer."""
    by_group = rows_by_group(step, groups, decode_raw)
    for rows, is_greedy in zip(by_group, greedy or (), strict=greedy is not None):
        for row in rows:
            row["greedy"] = is_greedy
    write_rows(path, [row for rows in by_group for row in rows])
