"""Attention kernels on a GPU against sums written out in fp64. Run with: bash tests/run.sh tests/gpu"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_rl.algorithms.context import ContextShare, Share, SharedPrompts, repeated
from megatron_rl.models.attention.backend import BACKENDS, Backend, Requirements
from megatron_rl.models.attention.kv_format import FP8, rounded_attention
from megatron_rl.models.attention.plan import prepared_for
from megatron_rl.models.attention.selection import facts_of
from tests.support.generation import generate, ragged_requests, rollout_engine
from tests.support.paged import FilledPages, naive
from tests.support.scoring import gaps, packed
from tests.support.tiny import tiny_config, tiny_policy
from tests.unit.attention.test_invariant import InvariantChecks
from tests.unit.attention.test_triton_paged import KernelChecks

pytestmark = pytest.mark.gpu
NAMES = ("triton_paged", "varlen", "sdpa")
BF16 = {"rtol": 0.03, "atol": 0.02}
WIDTH = 64


def backend_here(name: str, stored: torch.dtype = torch.bfloat16) -> Backend:
    backend, device = BACKENDS.get(name), facts_of(torch.device("cuda"))
    numbers = Requirements(torch.bfloat16, stored, WIDTH)
    kernels = [kernel for kernel in (backend.packed, backend.cache) if kernel is not None]
    problem = backend.problem(device) or next(filter(None, (k.unsupported(device, numbers) for k in kernels)), None)
    if problem is not None:
        pytest.skip(f"{name} {problem}")
    return backend


def pages_for(backend: Backend, lengths: list[int], **changes: object) -> FilledPages:
    if backend.cache is None:
        pytest.skip(f"{backend.name} knows no pages with this torch")
    sizes = {"heads": 8, "groups": 2, "width": WIDTH, "dtype": torch.bfloat16, "device": "cuda"}
    return FilledPages(lengths, block_size=backend.cache.block_size, **sizes | changes)


def captured(function: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph and the tensor that its replays fill."""
    function()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()
    return graph, out


class TestCompiled(KernelChecks):
    """The checks of the interpreter, compiled."""

    device = "cuda"
    fp32 = {"rtol": 1e-4, "atol": 1e-5}
    wide = torch.bfloat16  # the backend refuses them in fp32

    @pytest.mark.parametrize("stored", [None, FP8], ids=["bf16", "fp8"])
    def test_the_shape_of_a_model(self, stored):
        """32 query heads on 8, and more keys than one program takes."""
        pages = self.pages(
            [5000, 1, 777, 64], heads=32, groups=8, width=128, block_size=64, dtype=torch.bfloat16, stored=stored
        )
        torch.testing.assert_close(*pages.decoded(self.kernel), **self.low)
        starts = [4990, 0, 700, 63]
        torch.testing.assert_close(*pages.extended(self.kernel, starts), **self.low)


class TestInvariant(InvariantChecks):
    """Bits of decode, extend and packed batches of a 0.5B, and gradients by torch's flash kernel."""

    device, dtype, width, heads, groups = "cuda", torch.bfloat16, 64, 14, 2
    gradients = {"rtol": 0.05, "atol": 0.05}


class TestInvariantWide(TestInvariant):
    """The same of a 7B."""

    width, heads, groups = 128, 28, 4


@pytest.mark.parametrize("lengths", [[5000, 1, 777, 64], [255, 256, 257, 512]])
def test_a_row_of_an_invariant_decode_step_replays_to_the_same_bits(lengths):
    """Of 20 replays, in which other programs finish last; the counters are as they were."""
    backend = BACKENDS.get("invariant")
    pages = pages_for(backend, lengths)
    query, positions = pages.random(4, 1, 8, WIDTH), torch.tensor(lengths, device="cuda") - 1
    plan = backend.cache.prepare_decode(pages.cache, positions, max(lengths))
    graph, out = captured(lambda: backend.cache.decode(query, pages.cache, 0, plan))
    graph.replay()
    first = out.clone()
    for _ in range(20):
        graph.replay()
        assert torch.equal(out, first)
    assert not (plan.counters % ((positions // plan.length) + 1)[:, None]).any()


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("name", NAMES)
def test_packed(name, window):
    """Outputs and gradients in bf16 against sdpa's in fp32."""
    backend = backend_here(name)
    if backend.packed is None:
        pytest.skip(f"{name} has no packed kernel")
    if window is not None and not backend.packed.windows:
        pytest.skip(f"{name} has no sliding windows")
    lengths = [3, 1, 300, 64]
    borders = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    positions = torch.cat([torch.arange(length, device="cuda") for length in lengths])
    exact = [torch.randn(sum(lengths), 1, heads, WIDTH, device="cuda") for heads in (8, 2, 2)]
    results = []
    for kernel, dtype in ((backend.packed, torch.bfloat16), (BACKENDS.get("sdpa").packed, torch.float32)):
        tensors = [x.bfloat16().to(dtype).requires_grad_() for x in exact]
        out = kernel.attend(*tensors, prepared_for(window, kernel.prepare, lengths, borders, positions))
        gradients = torch.autograd.grad(out.float().square().sum(), tensors)
        results.append([x.float() for x in (out, *gradients)])
    for actual, expected in zip(*results, strict=True):
        assert (actual - expected).norm() < 0.02 * expected.norm()


SHARES: dict[str, Callable[[], Share]] = {
    "context-parallel": lambda: ContextShare.of([3, 1, 1300, 64], rank=0, size=2, device="cuda"),
    "prompts": lambda: SharedPrompts.of([700, 705, 1300, 64], [0, 650, 650, 0], device="cuda"),
}


@pytest.mark.parametrize("name", ["varlen", "sdpa"])
@pytest.mark.parametrize("kind", SHARES)
def test_spans(name, kind):
    """The same for queries that are the last of their keys; what the kernel was given of them is not kept."""
    kernel, plain = backend_here(name).packed.spans, BACKENDS.get("sdpa").packed.spans
    share = SHARES[kind]()
    queries, keys = share.local.numel(), share.keys.numel()
    exact = [torch.randn(size, 1, heads, WIDTH, device="cuda") for size, heads in ((queries, 8), (keys, 2), (keys, 2))]
    saved: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.untyped_storage().data_ptr())
        return tensor

    results = []
    for tried, dtype in ((kernel, torch.bfloat16), (plain, torch.float32)):
        tensors = [x.bfloat16().to(dtype).requires_grad_() for x in exact]
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            out = tried.attend(*tensors, tried.prepare(share))
        gradients = torch.autograd.grad(out.float().square().sum(), tensors)
        results.append([x.float() for x in (out, *gradients)])
        if tried is kernel and name != "sdpa":  # which pads short ones, in copies
            assert {x.untyped_storage().data_ptr() for x in tensors[1:]} <= set(saved)
    for actual, expected in zip(*results, strict=True):
        assert (actual - expected).norm() < 0.02 * expected.norm()


def test_gradients_of_shared_tokens_are_added_in_one_order():
    """As on a CPU up to rounding, and twice the same bits."""
    index = torch.arange(700).repeat(16)
    grad = torch.randn(index.numel(), 2, 64).bfloat16()
    found = []
    for device in ("cpu", "cuda", "cuda"):
        cells = torch.zeros(700, 2, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
        repeated(cells, index.to(device)).backward(grad.to(device))
        found.append(cells.grad.cpu())
    assert torch.equal(found[1], found[2])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("name", ["varlen", "triton_paged"])
@pytest.mark.parametrize("lengths", [[1], [300, 7, 256, 513]])
def test_cache(name, lengths):
    backend = backend_here(name)
    pages = pages_for(backend, lengths)
    torch.testing.assert_close(*pages.decoded(backend.cache), **BF16)
    starts = [max(0, length - 5) for length in lengths]
    torch.testing.assert_close(*pages.extended(backend.cache, starts), **BF16)


@pytest.mark.parametrize(
    ("name", "stored"), [("varlen", None), ("triton_paged", None), ("triton_paged", FP8)]
)
def test_one_captured_graph_serves_all_lengths(name, stored):
    """Positions, the table, the scales and the cache change in place between replays."""
    backend = backend_here(name, stored or torch.bfloat16)
    pages = pages_for(backend, [600, 600, 600], stored=stored)
    cache, kernel = pages.cache, backend.cache
    positions = torch.tensor([599, 599, 599], device="cuda")
    query = pages.random(3, 1, 8, WIDTH)
    graph, out = captured(lambda: kernel.decode(query, cache, 0, kernel.prepare_decode(cache, positions, 600)))
    known = [pages.known(slot) for slot in range(3)]
    for lengths, order in (([600, 1, 257], [0, 1, 2]), ([64, 599, 2], [2, 0, 1])):
        positions.copy_(torch.tensor(lengths, device="cuda") - 1)
        cache.table.copy_(cache.table[torch.tensor(order, device="cuda")])
        known = [known[slot] for slot in order]
        query.copy_(pages.random(3, 1, 8, WIDTH))
        if stored is not None:
            cache.format.key_scales *= 0.5
            cache.format.value_scales *= 2
            known = [(keys * 0.5, values * 2) for keys, values in known]
        graph.replay()
        expected = torch.stack([
            naive(query[row, 0].float(), *(x[:length] for x in known[row])) for row, length in enumerate(lengths)
        ])
        torch.testing.assert_close(out[:, 0].double(), expected, rtol=0.03, atol=0.08 if stored else 0.02)


@pytest.mark.parametrize("name", BACKENDS.names())
@pytest.mark.parametrize("stored", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
def test_engine_and_trainer_agree(one_rank, name, stored):
    """The trainer rounds keys and values as the cache does; what is left is bf16."""
    backend_here(name, stored)
    policy = tiny_policy(tiny_config(bf16=True, attention_backend=name))
    engine, requests = rollout_engine(policy, kv_cache_dtype=stored), ragged_requests(6, 2, max_new_tokens=16)
    batch = packed(requests, generate(policy, engine, requests), "cuda")
    with rounded_attention(policy.gpt.decoder.layers, engine.kv_format):
        assert gaps(policy, one_rank, batch, 1.0).max() < 0.15
