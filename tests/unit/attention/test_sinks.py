"""Attention sinks of torch's own kernels: by hand, and against sums over keys written out in fp64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from megatron_rl.algorithms.context import ContextShare
from megatron_rl.models.attention.backend import BACKENDS
from megatron_rl.models.attention.backends import sdpa
from megatron_rl.models.attention.padded import Buckets
from tests.support.paged import FilledPages, naive

SINKS = [-3.0, 0.0, 2.0, 5.0]
LENGTHS = [1, 7, 300, 4]
"""One of them is more than is spelt out."""


def tensors(*sizes: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(tokens, 1, heads, 16, generator=generator).requires_grad_() for tokens, heads in sizes]


def test_by_hand() -> None:
    """Two tokens with scores 0 and 0 (queries are 0), values 1 and 3, a sink of log 2: the second token has the shares
    1/4 and 1/4, and half goes nowhere."""
    query, key = torch.zeros(2, 1, 1, 4), torch.ones(2, 1, 1, 4)
    value = torch.tensor([1.0, 3.0]).view(2, 1, 1, 1).expand(2, 1, 1, 4).contiguous()
    packed = BACKENDS.get("sdpa").packed
    batch = [2], torch.tensor([0, 2], dtype=torch.int32), torch.arange(2)
    output = packed.attend(query, key, value, packed.prepare(*batch), torch.tensor([math.log(2)]))
    torch.testing.assert_close(output[:, 0, 0], torch.tensor([1 / 3, 1.0]))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("explicit_length", [256, 0], ids=["explicit", "kernel"])
def test_packed(monkeypatch: pytest.MonkeyPatch, explicit_length: int, window: int | None) -> None:
    """Results, and gradients of the sinks too."""
    monkeypatch.setattr(sdpa, "EXPLICIT_LENGTH", explicit_length)
    size, borders = sum(LENGTHS), torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    inputs = [*tensors((size, 4), (size, 2), (size, 2)), torch.tensor(SINKS, requires_grad=True)]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    actual = sdpa.packed_attention(*inputs[:3], Buckets.build(LENGTHS, borders, positions, window), inputs[3])
    expected = written_out(*inputs, window, zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True))
    same(actual[:, 0], expected, inputs)


@pytest.mark.parametrize("window", [None, 5])
def test_spans(window: int | None) -> None:
    """Of the second of two context-parallel ranks: short ones, and one of 300 keys."""
    share = ContextShare.of([37, 6, 1, 300], 1, 2)
    keys, queries = sum(share.key_lengths), share.local.numel()
    inputs = [*tensors((queries, 4), (keys, 2), (keys, 2)), torch.tensor(SINKS, requires_grad=True)]
    spans = BACKENDS.get("sdpa").packed.spans
    prepared = spans.prepare(share) if window is None else spans.prepare(share, window)
    actual = spans.attend(*inputs[:3], prepared, inputs[3])
    ends = list(itertools.accumulate(share.key_lengths))
    spans_of_keys = [(end - length, end) for end, length in zip(ends, share.key_lengths, strict=True)]
    expected = written_out(*inputs, window, spans_of_keys, list(share.query_lengths))
    same(actual[:, 0], expected, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages(dtype: torch.dtype) -> None:
    pages, kernel = FilledPages([1, 90, 16, 17], sinks=SINKS, dtype=dtype), BACKENDS.get("paged").cache
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.02}
    for buffer in (*pages.cache.keys, *pages.cache.values):
        buffer.nan_to_num_()  # a sum in plain torch reads whole pages, and weighs the rest with 0
    torch.testing.assert_close(*pages.decoded(kernel), **tolerance)
    torch.testing.assert_close(*pages.extended(kernel, [0, 60, 9, 16]), **tolerance)


def written_out(query, key, value, sinks, window, keys_of, query_lengths=None) -> torch.Tensor:
    """``keys_of``: where the keys of each sequence lie, of which its last queries see all."""
    found, token = [], 0
    for index, (first, end) in enumerate(keys_of):
        count = end - first if query_lengths is None else query_lengths[index]
        for last in range(end - count + 1, end + 1):
            seen = slice(first if window is None else max(first, last - window), last)
            found.append(naive(query[token, 0], key[seen, 0], value[seen, 0], sinks))
            token += 1
    return torch.stack(found)


def same(actual: torch.Tensor, expected: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    own, other = (torch.autograd.grad((output * weights).sum(), inputs) for output in (actual, expected))
    for gradient, reference in zip(own, other, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-4)
