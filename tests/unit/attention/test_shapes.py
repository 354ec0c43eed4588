"""Of how many shapes are the attention kernels of a training step, when its samples are of unequal lengths?

A library may build a plan, or a compiler a kernel, for each: cuDNN takes tens of milliseconds, forward and backward.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.models.attention.backends import sdpa, varlen
from megatron_rl.models.attention.padded import CUDA_BUCKET_CELLS
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.trainer.packing import pack
from tests.support import fake_kernels
from tests.support.samples import make_sample
from tests.support.tiny import VOCABULARY, tiny_config, tiny_policy
from tools.benchmark.update import our_update

BIN = 256
LAYERS = 2
DRAW = random.Random(1)
LENGTHS = [min(120, max(20, int(DRAW.lognormvariate(3.6, 0.6)))) for _ in range(64)]


@dataclass
class Calls:
    """What the kernels of a step were given."""

    count: int = 0
    tokens: int = 0
    """Rows of queries, padding included."""
    shapes: set[tuple[Any, ...]] = field(default_factory=set)


@pytest.fixture
def packed_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Of torch 2.11's kernel for packed batches: it is compiled for widths and the kind of mask, not for lengths."""
    calls = Calls()

    @functools.wraps(fake_kernels.varlen_attn_of_2_11)
    def recorded(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options):
        assert cu_seq_q[-1] == len(query) and cu_seq_k[-1] == len(key)
        calls.count, calls.tokens = calls.count + 1, calls.tokens + len(query)
        calls.shapes.add((query.shape[1:], key.shape[1:], query.dtype, options["window_size"]))
        return fake_kernels.varlen_attn_of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options)

    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=recorded))
    varlen.kernel.cache_clear()
    yield calls
    varlen.kernel.cache_clear()


@pytest.fixture
def padded_calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Of torch's ``scaled_dot_product_attention``, in the buckets of a GPU: rows and longest count."""
    calls, original = Calls(), torch.nn.functional.scaled_dot_product_attention

    def recorded(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.count, calls.tokens = calls.count + 1, calls.tokens + query.shape[0] * query.shape[2]
        calls.shapes.add((query.shape, key.shape, query.dtype))
        return original(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    monkeypatch.setattr(sdpa, "EXPLICIT_LENGTH", 0)
    monkeypatch.setattr("megatron_rl.models.attention.padded.BUCKET_CELLS", CUDA_BUCKET_CELLS)
    return calls


def gradient_norm(packed: Any, groups: ParallelGroups, lengths: Sequence[int]) -> float:
    """Of one update on samples of these lengths."""
    config = tiny_config(num_layers=LAYERS, seq_length=128, rl_sequence_packing_bin_size=BIN)
    policy = tiny_policy(config)
    policy = replace(policy, attention=replace(policy.attention, packed=packed))
    samples = [
        make_sample([(7 * place + number) % VOCABULARY for place in range(length)], sample_id=number)
        for number, length in enumerate(lengths)
    ]
    return our_update(policy, config, groups)(samples)[1]


def test_packed_batches_are_of_one_shape_without_padding(one_rank: ParallelGroups, packed_calls: Calls) -> None:
    norm = gradient_norm(varlen.BACKEND.packed, one_rank, LENGTHS)
    micro_batches = len(pack(LENGTHS, BIN, 0))
    assert micro_batches >= 8 and len(set(LENGTHS)) > 30
    assert len(packed_calls.shapes) == 1
    assert packed_calls.count % (LAYERS * micro_batches) == 0
    passes = packed_calls.count // (LAYERS * micro_batches)
    assert packed_calls.tokens == passes * LAYERS * sum(LENGTHS)
    assert norm == pytest.approx(gradient_norm(sdpa.BACKEND.packed, one_rank, LENGTHS), rel=1e-4)


def test_padded_batches_are_of_nearly_as_many_shapes_as_there_are(
    one_rank: ParallelGroups, padded_calls: Calls
) -> None:
    """Which is why a GPU has another kernel: only equal lengths have few."""
    gradient_norm(sdpa.BACKEND.packed, one_rank, LENGTHS)
    micro_batches = len(pack(LENGTHS, BIN, 0))
    assert micro_batches / 2 < len(padded_calls.shapes) <= micro_batches
    assert padded_calls.tokens > 1.1 * padded_calls.count / micro_batches * sum(LENGTHS)
    padded_calls.shapes.clear()
    gradient_norm(sdpa.BACKEND.packed, one_rank, [64] * 32)
    assert len(padded_calls.shapes) == 1
