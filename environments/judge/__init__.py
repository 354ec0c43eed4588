"""Answers that a model grades: rows of any data set, and a judge at an OpenAI-compatible URL, or the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_rl_environments.dataset import Dataset
from megatron_rl_environments.judge import ranked

from megatron_rl.environments.base import Environment, HarnessEnvironment
from megatron_rl.environments.judging import RANKING, Judge
from megatron_rl.types import Grade, Task

if TYPE_CHECKING:
    import openai


class Judged(HarnessEnvironment, ranked.Judging, Dataset):
    """Any data set, with rewards from 0 to 1 that another model gives.

    ``judge`` has the keys of ``JudgeSettings``. Rows are read as by ``dataset``; ``reference`` is the column of a
    reference answer, for the judge alone. An empty answer is worth 0, and not judged.
    """

    name = "judge"

    @classmethod
    def from_options(cls, given: Mapping[str, Any]) -> Environment:
        """See ``Environment.from_options``; a judge with the verdict ``ranking`` is asked about groups by `Ranked`."""
        judge = given.get("judge")
        ranks = isinstance(judge, Mapping) and judge.get("verdict") == RANKING
        return ranked.Ranked.from_options(given) if ranks else super().from_options(given)

    def run(self, task: Task, client: openai.OpenAI) -> Grade:
        """One answer of the model, and the judge's verdict on it."""
        question, reference = self.asked(task)
        if isinstance(task.prompt, str):
            answer = client.completions.create(model="policy", prompt=question).choices[0].text
        else:
            said = client.chat.completions.create(model="policy", messages=list(task.prompt))
            answer = said.choices[0].message.content or ""
        if not answer.strip():
            return Grade(0.0, status="no_answer")
        return Grade(Judge(self._settings, client).verdict(question, answer, reference))

    def gold_turns(self, task: Task) -> list[str] | None:
        """What the model says, as the one who answers and as its own judge."""
        return ["Because.", f"{self._settings.highest:g}"] if self._settings.is_own else None
