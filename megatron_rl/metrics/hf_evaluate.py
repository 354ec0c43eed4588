"""pass@k and accuracy as a Hugging Face ``evaluate`` metric, for people who evaluate with that library::

    PassAtK().compute(predictions=[[1.0, 0.0, 0.0, 0.0], [1.0, 1.0]], k=[1, 2])
    {"accuracy": 0.625, "pass@1": 0.625, "pass@2": 0.75}

No run imports this module: ``import evaluate`` brings ``datasets`` and ``transformers`` and takes seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose

import datasets
import evaluate

from megatron_rl.metrics.evaluation import pass_at_k


class PassAtK(evaluate.Metric):
    """Works offline and in memory: no file is written, no cache directory made."""

    def __init__(self) -> None:
        super().__init__(keep_in_memory=True)

    def _info(self) -> evaluate.MetricInfo:
        rewards = datasets.Sequence(datasets.Value("float64"))
        return evaluate.MetricInfo(
            description="The chance that one of k answers to a task is right, and the share of right answers.",
            citation="Chen et al., Evaluating Large Language Models Trained on Code, arXiv 2107.03374, equation 1",
            inputs_description="""
                predictions: for each task, the rewards of its answers; None is a failed grade, left out.
                highest: the reward of a right answer.
                k: attempts granted; a task with fewer graded answers than k does not count in pass@k.
            """,
            features=datasets.Features({"predictions": rewards}),
        )

    def _build_data_dir(self) -> str:
        """The base class would make one below the user's cache, though everything stays in memory."""
        return ""

    def _compute(
        self, predictions: Sequence[Sequence[float | None]], k: Sequence[int] = (1,), highest: float = 1.0
    ) -> dict[str, float]:
        graded = [
            [isclose(reward, highest, abs_tol=1e-6) for reward in rewards if reward is not None]
            for rewards in predictions
        ]
        tasks = [(len(right), sum(right)) for right in graded if right]
        results = {"accuracy": _mean([correct / count for count, correct in tasks])}
        for attempts in k:
            chances = [float(pass_at_k(*task, attempts)) for task in tasks if task[0] >= attempts]
            results[f"pass@{attempts}"] = _mean(chances)
        return results


def _mean(values: Sequence[float]) -> float:
    """NaN without a task to take the mean over: 0 would say that every answer was wrong."""
    return sum(values) / len(values) if values else float("nan")
