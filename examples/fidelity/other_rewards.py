"""The arithmetic environment with other rewards in training; held-out tasks are graded as usual."""

from __future__ import annotations

from environments.arithmetic import Arithmetic
from megatron_rl.environments.base import split_of
from megatron_rl.types import Grade, Task, Transcript


class Signed(Arithmetic):
    """1 for a right answer, -1 for a wrong one, and up to 0.5 less for length."""

    def grade(self, task: Task, transcript: Transcript) -> Grade:
        found = super().grade(task, transcript)
        if split_of(task.id) == "test":
            return found
        return Grade(2 * found.reward - 1 - 0.5 * min(1.0, max(0.0, len(transcript.text) - 40) / 60), found.metrics)


class Length(Arithmetic):
    """A reward for length alone."""

    def grade(self, task: Task, transcript: Transcript) -> Grade:
        found = super().grade(task, transcript)
        return found if split_of(task.id) == "test" else Grade(min(1.0, len(transcript.text) / 80))
