"""An endpoint that needs no model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_rl.endpoint.calls import Call, Endpoint
from megatron_rl.tokenizer import Tokenizer
from tests.support.endpoint import byte_tokenizer, completion, scripted


@pytest.fixture(scope="package")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def endpoint(tokenizer) -> Iterator[Endpoint]:
    """It says what it was asked for, and its choice's number."""
    def answer(call: Call):
        return completion(tokenizer, f"é{tokenizer.decode(call.ids)}{call.branch}")

    with scripted(tokenizer, answer) as endpoint:
        yield endpoint
