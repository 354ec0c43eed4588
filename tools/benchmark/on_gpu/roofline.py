"""What the machine can do at best: bytes moved by a copy, products of large matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from megatron_rl.quantization import formats
from tools.benchmark.on_gpu.measure import Bench, Row, guarded


def roofline(bench: Bench) -> Iterator[Row]:
    """Fills ``bench.ceilings`` with what it measures."""
    size = bench.sizes.copied_bytes
    source = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    rate = 2 * size / bench.seconds(lambda: target.copy_(source))
    bench.ceilings.bandwidth = rate
    yield {"what": "copy, read and written", "rate": rate, "unit": "B/s"}
    side = bench.sizes.cube
    peak = _flops(bench, side, _bf16_product(bench))
    bench.ceilings.peak = peak
    yield {"what": f"bf16 product, {side} cubed", "rate": peak, "unit": "flop/s"}
    for fast in (True, False):
        label = f"fp8 product by row, {side} cubed, fast accumulation {'on' if fast else 'off'}"
        yield from guarded(_fp8_peak(bench, fast), {"what": label})


def _fp8_peak(bench: Bench, fast: bool) -> Iterator[Row]:
    side = bench.sizes.cube
    a, b = _random(bench, side).to(formats.FP8), _random(bench, side).to(formats.FP8)
    scale_a = torch.ones(side, 1, device=bench.device)
    work = scaled_product(a, lambda: b, scale_a, torch.ones(1, side, device=bench.device), fast)
    yield {"rate": _flops(bench, side, work), "unit": "flop/s"}


def scaled_product(
    codes: torch.Tensor, weight: Callable[[], torch.Tensor], of_rows: torch.Tensor, of_columns: torch.Tensor, fast: bool
) -> Callable[[], torch.Tensor]:
    """``torch._scaled_mm`` with a scale a row of both; ``weight`` gives [N, K] codes, anew each time."""
    return lambda: torch._scaled_mm(
        codes, weight().t(), scale_a=of_rows, scale_b=of_columns, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def _bf16_product(bench: Bench) -> Callable[[], torch.Tensor]:
    a, b = _random(bench, bench.sizes.cube), _random(bench, bench.sizes.cube)
    return lambda: a @ b.t()


def _random(bench: Bench, side: int) -> torch.Tensor:
    """Random numbers: zeros take less power, and a GPU multiplies them faster."""
    return torch.randn(side, side, device=bench.device, dtype=torch.bfloat16)


def _flops(bench: Bench, side: int, work: Callable[[], object]) -> float:
    return 2 * side**3 / bench.seconds(work, inner=3)
