"""Fixtures of the phases' tests."""

from __future__ import annotations

import pytest

from megatron_rl.models.gpt import PolicyModel
from megatron_rl.platform.groups import ParallelGroups
from tests.support.tiny import tiny_policy


@pytest.fixture
def policy(one_rank: ParallelGroups) -> PolicyModel:
    """Random weights."""
    return tiny_policy()
