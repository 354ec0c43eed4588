"""A package for ``verifiers``, as its own documentation has them: tasks, a reward and a metric, and nothing of ours."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf


class DigitsConfig(vf.TasksetConfig):
    size: int = 256
    """Tasks."""


class DigitsData(vf.TaskData):
    wanted: str
    """Characters that are worth something."""


class DigitsTask(vf.Task[DigitsData]):
    @vf.reward
    async def share(self, task: DigitsData, trace: vf.Trace) -> float:
        """Of the reply's characters, how many are wanted."""
        return sum(character in task.wanted for character in trace.last_reply) / max(len(trace.last_reply), 1)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return len(trace.last_reply)


class DigitsTaskset(vf.Taskset[DigitsTask, DigitsConfig]):
    """Wants even digits: a model that has learnt nothing yet says some now and then, so it learns at once."""

    def load(self) -> Iterator[DigitsTask]:
        for number in range(self.config.size):
            data = DigitsData(id=f"digit-{number}", prompt=str(number), wanted="02468")
            yield DigitsTask(data, self.config.task)


__all__ = ["DigitsTaskset"]
