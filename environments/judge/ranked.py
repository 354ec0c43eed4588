"""Answers that a judge compares: all of a group in one question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from megatron_rl_environments.dataset import Dataset

from megatron_rl.environments.base import GroupEnvironment, lacks_openai
from megatron_rl.environments.judging import JudgeSettings
from megatron_rl.environments.ranking import Ranking
from megatron_rl.errors import ConfigError
from megatron_rl.types import Grade, Task, Transcript

MARGIN_SECONDS = 5.0
"""Beyond the judge's deadline, so that a worker can say what it waited for."""


class Judging:
    """The options of a data set that a judge rewards; comes before ``Dataset`` among the parents."""

    def __init__(self, *, judge: Mapping[str, Any] | None = None, reference: str = "", **options: Any) -> None:
        if options.get("reward"):
            raise ValueError("reward is what the judge says; leave it out, or use the environment dataset")
        super().__init__(reward=f"{__name__}:unasked", **options)
        self._reference, self._settings = reference, JudgeSettings.of(judge or {})
        self.variables = (self._settings.key_variable,) if self._settings.key_variable else ()

    def asked(self, task: Task) -> tuple[str, str]:
        """Return the question and the reference answer that the judge reads."""
        question = task.prompt if isinstance(task.prompt, str) else task.prompt[-1]["content"]
        return question, str(task.data["row"][self._reference]) if self._reference else ""


class Ranked(GroupEnvironment, Judging, Dataset):
    """Any data set, with rewards from 0 to 1 by a judge who compares the answers of a group."""

    name = "judge"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.grade_deadline = self._settings.deadline + MARGIN_SECONDS

    @classmethod
    def from_options(cls, given: Mapping[str, Any]) -> Self:
        """See ``GroupEnvironment.from_options``; a judge is asked by what comes with the extra ``agents``."""
        if problem := lacks_openai():
            raise ConfigError([f"{cls.name} {problem}"])
        return super().from_options(given)

    def grade_group(self, task: Task, transcripts: Sequence[Transcript]) -> list[Grade]:
        """The judge's scores, in one call."""
        question, reference = self.asked(task)
        answers = [self.answer_in(transcript) for transcript in transcripts]
        rewards = Ranking(self._settings).rewards(question, answers, reference)
        return [
            Grade(reward, status="" if answer.strip() else "no_answer")
            for reward, answer in zip(rewards, answers, strict=True)
        ]


def unasked(completion: str, row: Mapping[str, Any]) -> float:
    """Stands where ``dataset`` wants a reward."""
    raise NotImplementedError("the judge is asked")
