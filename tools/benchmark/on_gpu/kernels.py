"""Single kernels: attention of a decode step, products of the rollout's formats, quantisers, and re-quantisation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from megatron_rl.families.parts import LayerCache
from megatron_rl.inference.kv_cache import Cache, PagedCache, RowCache
from megatron_rl.models.attention.backend import BACKENDS, Backend, CacheKernel, Requirements
from megatron_rl.models.attention.selection import facts_of
from megatron_rl.models.gpt import build_model
from megatron_rl.models.rollout_ops import THIN_ROWS
from megatron_rl.platform.groups import seed_everything
from megatron_rl.quantization import formats
from megatron_rl.quantization.linears import QuantizedLinears
from megatron_rl.quantization.recipe import Packing, Recipe
from megatron_rl.registry import RECIPES
from tools.benchmark.common import benchmark_config
from tools.benchmark.on_gpu.measure import Bench, Row, guarded, scaled_product
from tools.benchmark.on_gpu.shapes import ratio, roofline_ms

MEASURED = ("fp8", "fp8_block", "int8")


def decode_attention(bench: Bench) -> Iterator[Row]:
    """One layer's attention of a decode step, by backend and type of KV cache, against a copy of the same bytes.

    Heads of a 7B; lengths equal to the longest, drawn from 1 to it, or short ones in a cache for long ones.
    """
    sizes, dtype = bench.sizes, torch.bfloat16 if bench.platform.is_cuda else torch.float32
    facts, width = facts_of(bench.device), sizes.middle.layout.layers[0].cache.key_width
    for name, stored in itertools.product(BACKENDS.names(), (dtype, formats.FP8)):
        backend = BACKENDS.get(name)
        if backend.cache is None:
            continue
        labels = {"backend": name, "cache": str(stored).removeprefix("torch.")}
        problem = backend.problem(facts) or backend.cache.unsupported(facts, Requirements(dtype, stored, width))
        if problem is not None:
            yield {**labels, "skipped": problem}
            continue
        lengths = [(longest, each) for longest in sizes.longest for each in (longest, None)]
        for rows, (longest, length) in itertools.product(sizes.attention_rows, (*lengths, *sizes.roomy)):
            row = _decode_attention(bench, backend, rows, longest, length, dtype, stored)
            yield from guarded(row, {**labels, "rows": rows, "longest": longest})


def _decode_attention(
    bench: Bench, backend: Backend, rows: int, longest: int, length: int | None, dtype: torch.dtype, stored: torch.dtype
) -> Iterator[Row]:
    """``length`` of all rows; None draws one for each.

    Calls go from layer to layer of a cache with so many that none finds its keys in the GPU's own cache, as in a model.
    """
    torch.manual_seed(0)
    sizes, kernel, layer = bench.sizes, backend.cache, bench.sizes.middle.layout.layers[0].cache
    lengths = torch.randint(1, longest + 1, (rows,)) if length is None else torch.full((rows,), length)
    read = layer.numbers(int(lengths.sum())) * stored.itemsize
    count = -(-sizes.rotated_bytes // read)
    cache, turns = _cache(bench, kernel, [layer] * count, rows, longest, dtype, stored), itertools.cycle(range(count))
    query = torch.randn(rows, 1, sizes.middle.heads, layer.key_width, device=bench.device).to(dtype)
    # What a model's layers share is prepared once a step.
    plan = kernel.prepare_decode(cache, lengths.to(bench.device) - 1, length or longest)
    took = bench.kernel_seconds(lambda: kernel.decode(query, cache, next(turns), plan), max(sizes.inner, count))
    copied = bench.bandwidth
    shown = {None: "ragged", longest: "equal"}.get(length, f"{length} each")
    yield {"lengths": shown, "layers": count, "us": 1e6 * took, "bytes": read, "bytes_per_second": read / took,
           "of_copy": None if copied is None else read / took / copied}  # fmt: skip


def _cache(
    bench: Bench, kernel: CacheKernel, layers: Sequence[LayerCache], rows: int, longest: int, dtype: torch.dtype,
    stored: torch.dtype,
) -> Cache:  # fmt: skip
    if kernel.layout == "rows":
        return RowCache(layers, rows, longest, dtype, bench.device, stored)
    cache = PagedCache(layers, rows, longest, kernel.block_size, dtype, bench.device, stored)
    order = torch.randperm(cache.table.numel(), device=bench.device).view(cache.table.shape)
    cache.table.copy_(order + 1)
    return cache


def products(bench: Bench) -> Iterator[Row]:
    """bf16 by cuBLAS and by `thin_product`, ``torch._scaled_mm`` by row, and the recipes' whole linears.

    A recipe quantises the activations, multiplies and scales.
    """
    for tokens in bench.sizes.batches:
        for linear in bench.sizes.middle.layout.layers[0].linears:
            labels = {"linear": linear.name.rpartition(".")[2], "N": linear.rows, "K": linear.columns, "M": tokens}
            yield from guarded(_products(bench, linear.rows, linear.columns, tokens), labels)
    bench.forget()


def _products(bench: Bench, rows: int, columns: int, tokens: int) -> Iterator[Row]:
    device, count = bench.device, max(2, bench.sizes.rotated_bytes // (rows * columns))
    x = torch.randn(tokens, columns, device=device, dtype=torch.bfloat16)
    weights = [torch.randn(rows, columns, device=device, dtype=torch.bfloat16) for _ in range(count)]
    turns = itertools.cycle(weights)
    plain = bench.kernel_seconds(lambda: x @ next(turns).t(), inner=count)
    least = roofline_ms(rows * columns, bench.bandwidth)
    yield {"product": "bf16", "us": 1e6 * plain, "ratio": ratio(1e3 * plain, None if least is None else 2 * least)}
    if tokens <= THIN_ROWS and bench.device.type == "cuda":
        yield from guarded(_thin(bench, x, turns, count, plain, least), {"product": "bf16, thin_product"})
    codes, turns8 = x.to(formats.FP8), itertools.cycle([weight.to(formats.FP8) for weight in weights])

    def timed(work: Callable[[], object]) -> Iterator[Row]:
        took = bench.kernel_seconds(work, inner=count)
        yield {"us": 1e6 * took, "ratio": ratio(1e3 * took, least), "speed_over_bf16": plain / took}

    def linear(recipe: Recipe) -> Iterator[Row]:
        quantised = itertools.cycle([recipe.quantize(weight) for weight in weights])
        yield from timed(lambda: recipe.matmul(x, next(quantised)))

    for fast in (True, False):
        work = scaled_product(codes, lambda: next(turns8), rows, fast)
        yield from guarded(timed(work), {"product": f"_scaled_mm, fast accumulation {'on' if fast else 'off'}"})
    for name in MEASURED:
        yield from guarded(linear(RECIPES.get(name)), {"product": f"linear as {name}"})


def _thin(
    bench: Bench, x: torch.Tensor, weights: Iterator[torch.Tensor], count: int, plain: float, least: float | None
) -> Iterator[Row]:
    from megatron_rl.quantization.thin_kernels import thin_product

    took = bench.kernel_seconds(lambda: thin_product(x, next(weights), None, None, x.dtype), inner=count)
    best = ratio(1e3 * took, None if least is None else 2 * least)
    yield {"us": 1e6 * took, "ratio": best, "speed_over_bf16": plain / took}


def activations(bench: Bench) -> Iterator[Row]:
    """The fused quantiser of activations, by the bytes it reads and writes."""
    if bench.device.type != "cuda":
        yield {"skipped": "a CUDA device is needed"}
        return
    from megatron_rl.quantization.kernels import quantize

    width = bench.sizes.middle.hidden
    segments = -(-width // formats.TILE)
    row, cut = Packing(formats.FP8, width), Packing(formats.FP8, segments * formats.TILE, in_segments=True)
    for tokens in bench.sizes.batches:
        x = torch.randn(tokens, width, device=bench.device, dtype=torch.bfloat16)
        for name, work, scales in (
            ("row", lambda x=x: quantize(x, row), tokens),
            ("128 columns", lambda x=x: quantize(x, cut), tokens * segments),
        ):
            took, size = bench.kernel_seconds(work, inner=20), 3 * tokens * width + 4 * scales
            least = roofline_ms(size, bench.bandwidth)
            yield {"scale": name, "M": tokens, "K": width, "us": 1e6 * took, "ratio": ratio(1e3 * took, least)}


def requantise(bench: Bench) -> Iterator[Row]:
    """All linears of the 7B, from bf16 parameters into the buffers of a recipe."""
    seed_everything(1)
    shape = bench.sizes.middle
    policy = build_model(benchmark_config(shape, 128, "--bf16", *bench.flags), bench.platform, shape.vocab)
    for name in MEASURED:
        yield from guarded(_requantise(bench, policy.gpt, name), {"model": shape.name, "recipe": name})
        bench.forget()


def _requantise(bench: Bench, gpt: torch.nn.Module, name: str) -> Iterator[Row]:
    linears = QuantizedLinears(gpt, RECIPES.get(name))
    took = bench.seconds(linears.refresh)
    bench.profile(name, linears.refresh)
    size = 2 * linears.num_weights + linears.stored_bytes
    least = roofline_ms(size, bench.bandwidth)
    yield {"ms": 1e3 * took, "bytes": size, "roofline_ms": least, "ratio": ratio(1e3 * took, least)}
