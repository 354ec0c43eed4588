"""One tiny model for all engine tests; no test changes its weights."""

from __future__ import annotations

import pytest

from megatron_rl.models.gpt import PolicyModel
from tests.support.generation import randomise_vectors
from tests.support.tiny import tiny_policy


@pytest.fixture(scope="package")
def policy(one_rank: object) -> PolicyModel:
    """Two layers, 32 tokens, with biases and norm weights that matter."""
    model = tiny_policy()
    randomise_vectors(model)
    return model
