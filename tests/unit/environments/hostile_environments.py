"""Environments that misbehave, each in one way; served by the tests as ``hostile_environments:Class``."""

from __future__ import annotations

import os
import signal
import sys
import time

from megatron_rl.environments.base import Environment, GroupEnvironment
from megatron_rl.types import Grade, Task


class _OneTask(Environment):
    def tasks(self, split):
        yield Task(id=f"{split}-0", prompt="2+2=", data={"answer": 4})


class Steady(_OneTask):
    """Grades by the length of the text, and fails where the text asks for it."""

    name = "steady"
    in_process = True  # it counts its calls, which workers would each do for themselves

    def __init__(self) -> None:
        self.calls = 0

    def grade(self, task, transcript):
        self.calls += 1
        if transcript.text == "raise":
            raise KeyError("no such thing")
        if transcript.text == "exit":
            sys.exit(3)
        if transcript.text == "sleep":
            time.sleep(0.5)
        return Grade(float(len(transcript.text)), {"calls": self.calls, "long": len(transcript.text) > 3})


class Slow(_OneTask):
    """Takes a fifth of a second for a grade."""

    name = "slow"

    def grade(self, task, transcript):
        time.sleep(0.2)
        return 0.0


class Rewards(_OneTask):
    """Returns the kind of reward that the text names."""

    name = "rewards"

    def grade(self, task, transcript):
        return {
            "nan": float("nan"),
            "infinity": float("inf"),
            "string": "1.0",
            "bool": True,
            "none": None,
            "huge": 10**400,
            "list": [1.0],
            "nan metric": Grade(1.0, {"m": float("nan")}),
            "integer": 1,
            "negative": -2.5,
        }[transcript.text]


class Distinct(GroupEnvironment):
    """Shares one point among equal answers, and misbehaves as the first of a group says."""

    name = "distinct"

    def tasks(self, split):
        yield Task(id=f"{split}-0", prompt="2+2=")

    def grade_group(self, task, transcripts):
        texts = [each.text for each in transcripts]
        if texts[0] == "raise":
            raise KeyError("no such thing")
        if texts[0] == "hang":
            time.sleep(60)
        if texts[0] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if texts[0] == "few":
            return [1.0]
        return [None if text == "none" else 1.0 / texts.count(text) for text in texts]


class BadRows(Environment):
    """Has tasks that cannot be used."""

    name = "bad_rows"

    def tasks(self, split):
        yield Task(id="a", prompt="fine")
        yield {"question": "2+2", "answer": 4}
        yield Task(id="a", prompt="again")
        yield Task(id="b", prompt="  ")
        yield Task(id="", prompt="x")
        yield Task(id="c", prompt="x", data={"gold": float("nan")})
        yield Task(id="d", prompt="x", data={"gold": (1, 2)})
        yield Task(id="e", prompt="x", data={"gold": object()})
        yield Task(id="f", prompt=({"role": "user", "text": "hi"},))
        raise KeyError("answer")

    def grade(self, task, transcript):
        return 0.0


class NoTasks(Environment):
    """Has no task at all."""

    name = "no_tasks"

    def tasks(self, split):
        return ()

    def grade(self, task, transcript):
        return 0.0


class Unkind(_OneTask):
    """Gives the gold answer nothing."""

    name = "unkind"

    def gold_answer(self, task):
        return "4"

    def grade(self, task, transcript):
        return 0.0


class Fickle(_OneTask):
    """Never grades the same way twice."""

    name = "fickle"
    rewards = iter(range(10**6))

    def grade(self, task, transcript):
        return float(next(self.rewards))
