"""DeepScaleR's rule, slime's ``--rm-type deepscaler``: the boxed answer after the thought, and nothing else.

A completion without ``</think>``, one that was cut while the model thought, has no answer, and neither has one without
a box. Answers are compared by the ``math`` grader, not by the string rules and sympy of the original.
"""

from __future__ import annotations

from megatron_rl.environments.grading import math
from megatron_rl.environments.grading.text import END_OF_THOUGHT, final_part, last_boxes
from megatron_rl.types import Grade

REWARDS = (0.0, 1.0)
FORM = END_OF_THOUGHT + "\\boxed{%s}"


def judge(completion: str, gold: str) -> Grade:
    """Return the verdict on a completion; ``gold`` as the ``math`` grader wants it."""
    _, thought, answer = completion.rpartition(END_OF_THOUGHT)
    if not thought or not last_boxes(final_part(answer)):
        return Grade(REWARDS[0], status="no_answer")
    return math.judge(answer, gold)
