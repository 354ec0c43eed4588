"""One tiny model for all engine tests; no test changes its weights."""

from __future__ import annotations

import pytest

from megatron_rl.models.gpt import PolicyModel
from tests.support.generation import randomise_vectors
from tests.support.tiny import tiny_config, tiny_policy


@pytest.fixture(scope="package")
def policy(one_rank: object) -> PolicyModel:
    """Two layers, 32 tokens, with biases and norm weights that matter."""
    model = tiny_policy()
    randomise_vectors(model)
    return model


@pytest.fixture(scope="package")
def paged(one_rank: object) -> PolicyModel:
    """The same model over a cache of pages."""
    model = tiny_policy(tiny_config(attention_backend="paged"))
    randomise_vectors(model)
    return model


@pytest.fixture(params=["slots", "pages"])
def either(request: pytest.FixtureRequest, policy: PolicyModel, paged: PolicyModel) -> PolicyModel:
    """Both, one after the other."""
    return policy if request.param == "slots" else paged
