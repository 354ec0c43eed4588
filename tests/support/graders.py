"""Graders in worker processes, as the environment server has them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from megatron_rl.environments.base import Environment
from megatron_rl.environments.grading import GRADERS, grade
from megatron_rl.environments.workers import WorkerPool
from megatron_rl.types import Grade, Task, Transcript


class Graded(Environment):
    """Compares with ``gold`` as the grader ``kind`` does."""

    name = "graded"

    def __init__(self, *, kind: str) -> None:
        self._kind = kind

    def tasks(self, split):
        return ()

    def grade(self, task, transcript):
        return grade(self._kind, transcript.text, task.data["gold"])


def grade_many(kind: str, pairs: Sequence[tuple[str, str]], deadline_s: float) -> list[Grade]:
    """The results of pairs of completion and gold answer."""
    items = [(Task("0", "?", {"gold": gold}), Transcript(text, "stop", len(text))) for text, gold in pairs]
    with contextlib.closing(WorkerPool()) as pool:
        lowest = GRADERS.module(kind).REWARDS[0]
        return pool.grade("tests.support.graders:Graded", {"kind": kind}, items, deadline_s, lowest)
