"""Attention over context-parallel ranks is that of one rank: outputs and gradients, in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_rl.algorithms.context import ContextShare
from megatron_rl.models.attention.backend import SpanKernel
from megatron_rl.models.attention.backends import sdpa
from megatron_rl.models.attention.context import ContextPlan
from megatron_rl.models.attention.plan import PackedPlan
from megatron_rl.platform.groups import ParallelGroups
from tests.support.ranks import joined, run_ranks

WIDTH = 16
BATCHES = {
    "short": [37, 5, 60, 1, 25],
    "fewer tokens than chunks": [1, 1, 1, 3, 2],
    "long": [1500, 263, 1200, 300, 1],
    "long on one of two ranks": [300],  # 75 and 300 keys, 150 and 225: only 300 is more than is spelt out
}  # fmt: skip
"""Sums that four ranks divide but for the last one, which is filled up."""


def attended(cases: dict[str, list[int]], heads: int, groups: int) -> dict[str, Any]:
    """Of each case the largest differences of this rank's outputs and gradients, and what autograd kept."""
    import torch.distributed as dist

    with joined() as (rank, size):
        torch.set_default_dtype(torch.float64)
        return {name: one_case(lengths, heads, groups, dist.group.WORLD, rank, size) for name, lengths in cases.items()}


def one_case(lengths: list[int], heads: int, groups: int, group: Any, rank: int, size: int) -> dict[str, float]:
    lengths = [*lengths, *([filler] if (filler := -sum(lengths) % size) else [])]
    total, generator = sum(lengths), torch.Generator().manual_seed(0)
    whole = [torch.randn(total, 1, n, WIDTH, generator=generator).requires_grad_() for n in (heads, groups, groups)]
    weights = torch.randn(total, 1, heads * WIDTH, generator=generator)

    borders = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in lengths])
    kernel = sdpa.BACKEND.packed
    one_rank = PackedPlan(qkv_format="thd", kernel=kernel, prepared={None: kernel.prepare(lengths, borders, positions)})
    expected = one_rank.attend(1, *whole)
    (expected * weights).sum().backward()

    share = ContextShare.of(lengths, rank, size)
    own = [tensor.detach()[share.local].requires_grad_() for tensor in whole]
    plan = ContextPlan(
        qkv_format="thd", kernel=kernel, prepared={None: kernel.spans.prepare(share)}, share=share, context_group=group
    )
    actual = plan.attend(1, *own)
    (actual * weights[share.local]).sum().backward()
    pairs = [(actual, expected[share.local]), *((a.grad, b.grad[share.local]) for a, b in zip(own, whole, strict=True))]
    return {name: (a - b).abs().max().item() for name, (a, b) in zip(("output", "q", "k", "v"), pairs, strict=True)}


@pytest.mark.parametrize(("size", "heads", "groups"), [(2, 4, 2), (4, 5, 1)])
def test_as_on_one_rank(size: int, heads: int, groups: int) -> None:
    """Five heads, which no exchange of tokens for heads could share among ranks."""
    for differences in run_ranks(f"{__name__}:attended", size, cases=BATCHES, heads=heads, groups=groups):
        for name, found in differences.items():
            assert max(found.values()) < 1e-6, (name, found)  # short rows have their softmax in fp32


@pytest.mark.parametrize("keeps", [True, False])
def test_the_keys_that_were_gathered_are_not_kept(one_rank: ParallelGroups, keeps: bool) -> None:
    """They are gathered again in the backward pass. A kernel that works on a copy ``keeps`` that."""
    spans, gathered = sdpa.BACKEND.packed.spans, []

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, prepared: Any) -> torch.Tensor:
        key, value = (key.clone(), value.clone()) if keeps else (key, value)
        gathered.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in (key, value))
        return spans.attend(query, key, value, prepared)

    share = ContextShare.of([1000], 0, 1)
    own = [torch.randn(1000, 1, 2, WIDTH, requires_grad=True) for _ in range(3)]
    plan = ContextPlan(
        qkv_format="thd", kernel=replace(sdpa.BACKEND.packed, spans=SpanKernel(spans.prepare, attend)),
        prepared={None: spans.prepare(share)}, share=share, context_group=one_rank.tensor_group,
    )  # fmt: skip
    output = plan.attend(1, *own)
    assert [seen.expired() for seen in gathered] == [not keeps] * 2
    output.sum().backward()
    assert all(seen.expired() for seen in gathered)
