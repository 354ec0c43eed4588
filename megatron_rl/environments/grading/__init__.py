"""Graders: text in, reward and reason out; and the guard that turns any environment's verdict into a result.

::

    dispatch    grade() and grade_many(): what environments call, from any thread
    discovery   a file is a kind:  math  dapo  exact_number  countdown
    text        where the answer stands in a completion
    pieces      format rewards and length penalties, to be added to a grade
    sample      grade_one(): an environment's verdict on one sample as a result, whatever happens
"""

from megatron_rl.environments.grading.dispatch import grade, grade_many
from megatron_rl.environments.grading.expressions import arithmetic_value
from megatron_rl.environments.grading.pieces import combined, ends_with_answer_line, format_reward, overlong_penalty
from megatron_rl.environments.grading.sample import grade_one

__all__ = [
    "arithmetic_value",
    "combined",
    "ends_with_answer_line",
    "format_reward",
    "grade",
    "grade_many",
    "grade_one",
    "overlong_penalty",
]
