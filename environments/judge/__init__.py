"""Answers that a model grades: rows of any data set, and a judge at an OpenAI-compatible URL, or the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_rl_environments.dataset import Dataset

from megatron_rl.environments.base import HarnessEnvironment
from megatron_rl.environments.judging import Judge, JudgeSettings
from megatron_rl.types import Grade, Task

if TYPE_CHECKING:
    import openai


class Judged(HarnessEnvironment, Dataset):
    """Any data set, with rewards from 0 to 1 that another model gives.

    ``judge`` has the keys of ``JudgeSettings``. Rows are read as by ``dataset``; ``reference`` is the column of a
    reference answer, for the judge alone. An empty answer is worth 0, and not judged.
    """

    name = "judge"

    def __init__(self, *, judge: Mapping[str, Any] | None = None, reference: str = "", **options: Any) -> None:
        if options.get("reward"):
            raise ValueError("reward is what the judge says; leave it out, or use the environment dataset")
        super().__init__(reward=f"{__name__}:unasked", **options)
        self._reference, self._settings = reference, JudgeSettings.of(judge or {})
        self.variables = (self._settings.key_variable,) if self._settings.key_variable else ()

    def run(self, task: Task, client: openai.OpenAI) -> Grade:
        """One answer of the model, and the judge's verdict on it."""
        if isinstance(task.prompt, str):
            question = task.prompt
            answer = client.completions.create(model="policy", prompt=question).choices[0].text
        else:
            question = task.prompt[-1]["content"]
            said = client.chat.completions.create(model="policy", messages=list(task.prompt))
            answer = said.choices[0].message.content or ""
        if not answer.strip():
            return Grade(0.0, status="no_answer")
        reference = task.data["row"][self._reference] if self._reference else ""
        return Grade(Judge(self._settings, client).verdict(question, answer, str(reference)))

    def gold_turns(self, task: Task) -> list[str] | None:
        """What the model says, as the one who answers and as its own judge."""
        return ["Because.", f"{self._settings.highest:g}"] if self._settings.is_own else None


def unasked(completion: str, row: Mapping[str, Any]) -> float:
    """Stands where ``dataset`` wants a reward."""
    raise NotImplementedError("the judge is asked")
