"""Graders: text in, reward and reason out.

::

    dispatch    grade() and grade_many(): what environments call, from any thread
    math  dapo  exact_number  countdown: a file that defines ``judge(completion, gold) -> Grade`` and ``REWARDS``, the
                lowest and the highest, is a kind; with ``NEEDS_WORKER = True`` it only runs where it can be killed
    text        where the answer stands in a completion
"""

from megatron_rl.environments.grading.dispatch import grade, grade_many
from megatron_rl.environments.grading.expressions import arithmetic_value

__all__ = ["arithmetic_value", "grade", "grade_many"]
