"""As ``unit_tests``, but the reward is the share of the tests that the code passes."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.environments.grading.unit_tests import DEADLINE, NEEDS_SANDBOX, REWARDS
from megatron_rl.environments.grading.unit_tests import judge as judge_all
from megatron_rl.types import Grade

__all__ = ["DEADLINE", "NEEDS_SANDBOX", "REWARDS", "judge"]


def judge(completion: str, gold: str) -> Grade:
    """Return the verdict on a completion; ``partial`` where it passes some tests."""
    verdict = judge_all(completion, gold)
    share = verdict.metrics["tests_passed"]
    return replace(verdict, reward=share, status="partial" if 0 < share < 1 else verdict.status)
