"""The gold text to the letter, spaces around it aside; what a model thought before it does not count."""

from __future__ import annotations

from megatron_rl.environments.grading.text import END_OF_THOUGHT
from megatron_rl.types import Grade

REWARDS = (0.0, 1.0)
FORM = "%s"


def judge(completion: str, gold: str) -> Grade:
    answer = completion.rpartition(END_OF_THOUGHT)[2].strip()
    if not answer:
        return Grade(REWARDS[0], status="no_answer")
    right = answer == gold.strip()
    return Grade(REWARDS[right], status="correct" if right else "wrong", extracted=answer)
