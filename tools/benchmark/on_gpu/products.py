"""Single products of the rollout's formats, the quantiser of activations, and the re-quantisation of a model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from megatron_rl.models import build_model
from megatron_rl.parallel import seed_everything
from megatron_rl.quantization import formats, kernels
from megatron_rl.quantization.linears import QuantizedLinears
from megatron_rl.registry import RECIPES
from tools.benchmark.common import benchmark_config
from tools.benchmark.on_gpu.measure import Bench, Row, guarded
from tools.benchmark.on_gpu.roofline import scaled_product
from tools.benchmark.on_gpu.shapes import ratio, roofline_ms

MEASURED = ("fp8", "fp8_block", "int8")


def products(bench: Bench) -> Iterator[Row]:
    """bf16, ``torch._scaled_mm`` by row, and the recipes' whole linears (activations quantised, product, scales)."""
    for tokens in bench.sizes.rows:
        for name, (rows, columns) in bench.sizes.middle.linears.items():
            labels = {"linear": name, "N": rows, "K": columns, "M": tokens}
            yield from guarded(_products(bench, rows, columns, tokens), labels)
    bench.forget()


def _products(bench: Bench, rows: int, columns: int, tokens: int) -> Iterator[Row]:
    device, count = bench.device, max(2, bench.sizes.rotated_bytes // (rows * columns))
    x = torch.randn(tokens, columns, device=device, dtype=torch.bfloat16)
    weights = [torch.randn(rows, columns, device=device, dtype=torch.bfloat16) for _ in range(count)]
    turns = itertools.cycle(weights)
    plain = bench.kernel_seconds(lambda: x @ next(turns).t(), inner=count)
    least = roofline_ms(rows * columns, bench.ceilings.bandwidth)
    yield {"product": "bf16", "us": 1e6 * plain, "ratio": ratio(1e3 * plain, None if least is None else 2 * least)}
    codes, turns8 = x.to(formats.FP8), itertools.cycle([weight.to(formats.FP8) for weight in weights])
    scales = torch.ones(tokens, 1, device=device), torch.ones(1, rows, device=device)

    def timed(work: Callable[[], object]) -> Iterator[Row]:
        took = bench.kernel_seconds(work, inner=count)
        yield {"us": 1e6 * took, "ratio": ratio(1e3 * took, least), "speed_over_bf16": plain / took}

    for fast in (True, False):
        work = scaled_product(codes, lambda: next(turns8), *scales, fast)
        yield from guarded(timed(work), {"product": f"_scaled_mm, fast accumulation {'on' if fast else 'off'}"})
    for name in MEASURED:
        yield from guarded(_linear(name, x, weights, timed), {"product": f"linear as {name}"})


def _linear(
    name: str, x: torch.Tensor, weights: list[torch.Tensor], timed: Callable[[Callable[[], object]], Iterator[Row]]
) -> Iterator[Row]:
    recipe = RECIPES.get(name)
    turns = itertools.cycle([recipe.quantize(weight) for weight in weights])
    yield from timed(lambda: recipe.matmul(x, next(turns)))


def activations(bench: Bench) -> Iterator[Row]:
    """The fused quantiser of activations, by the bytes it reads and writes."""
    if not kernels.available():
        yield {"skipped": "Triton with a CUDA device is needed"}
        return
    from megatron_rl.quantization.kernels.activations import quantize_rows, quantize_segments

    width = bench.sizes.middle.hidden
    for tokens in bench.sizes.rows:
        x = torch.randn(tokens, width, device=bench.device, dtype=torch.bfloat16)
        for name, work, scales in (
            ("row", lambda x=x: quantize_rows(x, formats.FP8), tokens),
            ("128 columns", lambda x=x: quantize_segments(x), tokens * -(-width // formats.TILE)),
        ):
            took, size = bench.kernel_seconds(work, inner=20), 3 * tokens * width + 4 * scales
            least = roofline_ms(size, bench.ceilings.bandwidth)
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
    size = 2 * linears.num_weights + linears.stored_bytes
    least = roofline_ms(size, bench.ceilings.bandwidth)
    yield {"ms": 1e3 * took, "bytes": size, "roofline_ms": least, "ratio": ratio(1e3 * took, least)}
