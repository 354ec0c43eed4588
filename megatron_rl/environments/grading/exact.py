"""The gold text to the letter, spaces around it aside; the thought before it does not count, in either text."""

from __future__ import annotations

from megatron_rl.environments.grading.text import without_thought
from megatron_rl.types import Grade

REWARDS = (0.0, 1.0)
FORM = "%s"


def judge(completion: str, gold: str) -> Grade:
    answer = without_thought(completion)
    if not answer:
        return Grade(REWARDS[0], status="no_answer")
    right = answer == without_thought(gold)
    return Grade(REWARDS[right], status="correct" if right else "wrong", extracted=answer)
