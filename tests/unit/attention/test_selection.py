"""A kernel that raises or computes something else is left out, or refused where it was asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from megatron_rl.algorithms.context import ContextShare
from megatron_rl.errors import ConfigError
from megatron_rl.models.attention import selection
from megatron_rl.models.attention.backend import BACKENDS, Backend, Requirements, SpanKernel
from megatron_rl.models.attention.backends import paged, sdpa
from megatron_rl.models.attention.kv_format import FP8
from tests.support.tiny import tiny_config, tiny_policy

CPU = torch.device("cpu")
REQUIREMENTS = [
    Requirements(torch.float32, torch.float32, 16),
    Requirements(torch.bfloat16, torch.bfloat16, 80),
    Requirements(torch.bfloat16, FP8, 64),
]


def broken(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A kernel that forgets the last head."""

    def attend(*inputs: object) -> torch.Tensor:
        output = original(*inputs).clone()
        output[..., -1] = 0.0
        return output

    return attend


def raising(*_: object) -> torch.Tensor:
    raise RuntimeError("no kernel image\nis available")


@pytest.mark.parametrize("needed", REQUIREMENTS, ids=str)
def test_right_kernels_pass(needed: Requirements) -> None:
    own = dataclasses.replace(paged.BACKEND.cache, block_multiple=32)
    assert selection.fault_of_cache(own, needed, 4, 2, CPU) is None
    assert selection.fault_of_packed(sdpa.BACKEND.packed, needed, 4, 2, CPU) is None


@pytest.mark.parametrize("needed", REQUIREMENTS, ids=str)
@pytest.mark.parametrize("part", ["decode", "extend"])
def test_wrong_kernels_do_not(needed: Requirements, part: str) -> None:
    kernel = paged.BACKEND.cache
    wrong = dataclasses.replace(kernel, **{part: broken(getattr(kernel, part))})
    assert "off plain torch" in selection.fault_of_cache(wrong, needed, 4, 2, CPU)
    packed = dataclasses.replace(sdpa.BACKEND.packed, attend=broken(sdpa.BACKEND.packed.attend))
    assert "off plain torch" in selection.fault_of_packed(packed, needed, 4, 2, CPU)


@pytest.mark.parametrize("needed", REQUIREMENTS, ids=str)
def test_a_causal_mask_in_the_wrong_corner_is_noticed_where_sequences_are_shared(needed: Requirements) -> None:
    """Whole sequences do not show it: each span is as long as its keys."""
    packed = sdpa.BACKEND.packed

    def upper_left(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, share: ContextShare) -> torch.Tensor:
        parts = zip(
            query.split(share.query_lengths), key.split(share.key_lengths), value.split(share.key_lengths), strict=True
        )
        found = [
            torch.nn.functional.scaled_dot_product_attention(
                *(part.permute(1, 2, 0, 3) for part in own), is_causal=True, enable_gqa=True
            )
            for own in parts
        ]
        return torch.cat([own.permute(2, 0, 1, 3).flatten(2) for own in found])

    wrong = dataclasses.replace(packed, spans=SpanKernel(lambda share: share, upper_left))
    shared = dataclasses.replace(needed, spans=True)
    assert selection.fault_of_packed(wrong, needed, 4, 2, CPU) is None
    assert "off plain torch" in selection.fault_of_packed(wrong, shared, 4, 2, CPU)
    assert selection.fault_of_packed(packed, shared, 4, 2, CPU) is None


def test_the_first_line_of_an_error_is_told() -> None:
    kernel = dataclasses.replace(paged.BACKEND.cache, decode=raising)
    assert selection.fault_of_cache(kernel, REQUIREMENTS[0], 4, 2, CPU) == "fails here (RuntimeError: no kernel image)"


def offered(monkeypatch: pytest.MonkeyPatch, decode: Callable[..., torch.Tensor]) -> None:
    """As if ``varlen`` ran here, over pages, with that decode kernel."""
    cache = dataclasses.replace(paged.BACKEND.cache, decode=decode)
    broken = Backend("varlen", lambda _: None, None, cache, cache_rank=9)
    monkeypatch.setattr(BACKENDS.module("varlen"), "BACKEND", broken)


def test_a_working_kernel_is_taken(one_rank: object, monkeypatch: pytest.MonkeyPatch) -> None:
    offered(monkeypatch, paged.BACKEND.cache.decode)
    assert tiny_policy().attention.cache_name == "varlen"


def test_another_takes_the_place_of_a_broken_one(one_rank: object, monkeypatch: pytest.MonkeyPatch) -> None:
    offered(monkeypatch, raising)
    attention = tiny_policy().attention
    assert attention.cache_name == "sdpa"
    assert "varlen fails here (RuntimeError: no kernel image)" in attention.reason


def test_a_broken_one_that_was_asked_for_is_refused(one_rank: object, monkeypatch: pytest.MonkeyPatch) -> None:
    offered(monkeypatch, broken(paged.BACKEND.cache.decode))
    with pytest.raises(ConfigError, match="--attention-backend varlen computes something else here: .*; use auto"):
        tiny_policy(tiny_config(attention_backend="varlen"))
