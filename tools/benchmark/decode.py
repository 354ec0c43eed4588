"""Decode steps of quantised 7B-like layers on a GPU against the time it takes to read their bytes once.

Part of ``python -m tools.benchmark.quantization decode``. Wall-clock medians between device synchronisations.
The vocabulary is small, so the unquantised head does not hide the layers.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_rl.inference import RolloutEngine
from megatron_rl.inference.kv_cache import CacheShape
from megatron_rl.inference.options import EngineOptions
from megatron_rl.metrics.table import format_table
from megatron_rl.models import PolicyModel, build_model, rollout_mode
from megatron_rl.parallel import initialize, seed_everything, shut_down
from megatron_rl.platform import Platform, current_platform
from megatron_rl.quantization import formats, get_recipe
from megatron_rl.quantization.linears import QuantizedLinears, parallel_linears
from megatron_rl.quantization.rollout import RolloutQuantization
from megatron_rl.types import GenerationRequest, SamplingParams, SourcedTask, Task
from tools.benchmark.common import Shape, benchmark_config, random_prompts

RECIPES = ("none", "fp8", "fp8_block", "int8")
STEPS_PER_BURST = 8
VOCAB = 512
COPIED_BYTES = 2**30
ROTATED_BYTES = 2**28
"""Products go through this much weight before they come to the same again: more than any cache holds."""


@dataclass(frozen=True)
class DecodeSizes:
    """Layers of Qwen2.5-7B, fewer of them."""

    hidden: int = 3584
    ffn: int = 18944
    heads: int = 28
    groups: int = 4
    layers: int = 4
    batches: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    prompt_tokens: int = 64
    bursts: int = 9
    """Timed bursts of decode steps; their median counts."""

    @property
    def new_tokens(self) -> int:
        """The prefill gives one, the first burst is not timed."""
        return 1 + STEPS_PER_BURST * (1 + self.bursts)

    def flags(self) -> list[str]:
        """Over those of `Shape`."""
        return [
            "--bf16",
            f"--ffn-hidden-size={self.ffn}",
            f"--num-attention-heads={self.heads}",
            f"--num-query-groups={self.groups}",
        ]


def decode_section(sizes: DecodeSizes) -> dict[str, Any]:
    """Everything that needs a GPU; without one the reason why it is skipped."""
    if not torch.cuda.is_available():
        reason = "no CUDA device: a CPU's figures are in the sections before"
        print(f"\ndecode: skipped, {reason}")
        return {"skipped": reason}
    platform = current_platform()
    config = benchmark_config(Shape(sizes.hidden, sizes.layers), 128, *sizes.flags())
    initialize(config.parallel, platform)
    try:
        seed_everything(1)
        bandwidth = copy_bandwidth(platform)
        policy = _build(sizes, platform)
        section = {
            "copy_bytes_per_second": bandwidth,
            "refresh_ms": {name: refresh_ms(policy, name) for name in RECIPES[1:]},
            "decode": [row for name in RECIPES for row in decode_rows(policy, name, sizes, bandwidth)],
            "products": product_rows(policy, sizes, bandwidth),
        }
    finally:
        shut_down()
    print_decode(section)
    return section


def _build(sizes: DecodeSizes, platform: Platform) -> PolicyModel:
    length = sizes.prompt_tokens + sizes.new_tokens
    config = benchmark_config(Shape(sizes.hidden, sizes.layers), length, *sizes.flags())
    return build_model(config, platform, VOCAB)


def seconds(work: Callable[[], object], device: torch.device, repeats: int = 9, inner: int = 1) -> float:
    """Median wall-clock seconds of one ``work``, the device idle before and after each ``inner`` of them."""
    times = []
    for _ in range(repeats + 1):  # the first is not counted
        _wait(device)
        started = time.perf_counter()
        for _ in range(inner):
            work()
        _wait(device)
        times.append((time.perf_counter() - started) / inner)
    return statistics.median(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bandwidth(platform: Platform) -> float:
    """Bytes read and written a second by a large ``copy_``."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=platform.device)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / seconds(lambda: target.copy_(source), platform.device)


def refresh_ms(policy: PolicyModel, recipe: str) -> float:
    """Of all layers there are."""
    linears = QuantizedLinears(policy.gpt, get_recipe(recipe))
    return 1e3 * seconds(linears.refresh, policy.device)


# -- decode steps ------------------------------------------------------------------------------


def decode_rows(policy: PolicyModel, recipe: str, sizes: DecodeSizes, bandwidth: float) -> list[dict[str, Any]]:
    """One row a batch size: milliseconds of a step, and of reading its bytes at ``bandwidth``."""
    quantization = RolloutQuantization(policy.gpt, recipe, (), sizes.layers, lambda rows: None)
    rows = []
    for batch in sizes.batches:
        step = step_seconds(policy, quantization, batch, sizes)
        least = bytes_read(policy, quantization, batch, sizes) / bandwidth
        rows.append({"recipe": recipe, "batch": batch, "step_ms": 1e3 * step, "roofline_ms": 1e3 * least})
    return rows


def step_seconds(
    policy: PolicyModel, quantization: RolloutQuantization, batch: int, sizes: DecodeSizes
) -> float:
    """Median seconds of a decode step, over the bursts after the first."""
    length = sizes.prompt_tokens + sizes.new_tokens
    engine = RolloutEngine(policy, EngineOptions(batch, length, STEPS_PER_BURST), [], str)
    sampling = SamplingParams(max_new_tokens=sizes.new_tokens)
    prompts = random_prompts(batch, sizes.prompt_tokens, VOCAB, seed=1)

    def start() -> None:
        """Prefill and the first burst."""
        engine.begin(0, policy_version=0)
        for index, prompt in enumerate(prompts):
            task = SourcedTask("benchmark", Task(str(index), ""))
            engine.submit(GenerationRequest(task, prompt, 1, sampling, index))
        engine.step()

    def burst() -> float:
        before = engine.statistics.decode_steps
        _wait(policy.device)
        started = time.perf_counter()
        engine.step()
        _wait(policy.device)
        return (time.perf_counter() - started) / (engine.statistics.decode_steps - before)

    times = []
    with rollout_mode(policy), quantization.rollout(start):
        start()  # the audit looks at this one
    with rollout_mode(policy), quantization.rollout(start):
        start()
        while engine.has_unfinished:
            times.append(burst())
    return statistics.median(times)


def bytes_read(policy: PolicyModel, quantization: RolloutQuantization, batch: int, sizes: DecodeSizes) -> int:
    """What one decode step cannot do without: weights, the head, and half-way keys and values."""
    linears = parallel_linears(policy.gpt)
    plain = sum(module.weight.nbytes for module in linears.values())
    middle = sizes.prompt_tokens + sizes.new_tokens // 2
    cache = CacheShape.of(policy.gpt, middle, policy.dtype).bytes_per_slot
    return (quantization.stored_bytes or plain) + policy.gpt.output_layer.weight.nbytes + batch * cache


# -- single products ---------------------------------------------------------------------------


def product_rows(policy: PolicyModel, sizes: DecodeSizes, bandwidth: float) -> list[dict[str, Any]]:
    """bf16 and rowwise ``torch._scaled_mm`` on the shapes of one layer's linears, activations already quantised."""
    shapes = {
        name.removeprefix("layers.0."): tuple(module.weight.shape)
        for name, module in parallel_linears(policy.gpt).items()
        if name.startswith("layers.0.")
    }
    return [
        _product_row(name, shape, batch, policy.device, bandwidth)
        for name, shape in shapes.items()
        for batch in sizes.batches
    ]


def _product_row(
    name: str, shape: tuple[int, int], batch: int, device: torch.device, bandwidth: float
) -> dict[str, Any]:
    rows, columns = shape
    count = max(2, ROTATED_BYTES // (rows * columns))
    x = torch.randn(batch, columns, device=device, dtype=torch.bfloat16)
    weights = [torch.randn(rows, columns, device=device, dtype=torch.bfloat16) for _ in range(count)]
    turns = itertools.cycle(weights)
    plain = seconds(lambda: x @ next(turns).t(), device, inner=count)
    codes, fp8_turns = x.to(formats.FP8), itertools.cycle([weight.to(formats.FP8) for weight in weights])
    of_tokens, of_channels = torch.ones(batch, 1, device=device), torch.ones(1, rows, device=device)

    def scaled() -> torch.Tensor:
        return torch._scaled_mm(
            codes, next(fp8_turns).t(), scale_a=of_tokens, scale_b=of_channels, out_dtype=torch.bfloat16
        )

    fp8 = seconds(scaled, device, inner=count)
    return {
        "linear": name,
        "batch": batch,
        "bf16_us": 1e6 * plain,
        "fp8_us": 1e6 * fp8,
        "fp8_roofline_us": 1e6 * rows * columns / bandwidth,
    }


# -- tables ------------------------------------------------------------------------------------


def print_decode(section: dict[str, Any]) -> None:
    """Bandwidth, refreshes, decode steps and products."""
    print(f"\ndecode: copy bandwidth {section['copy_bytes_per_second'] / 1e12:.2f} TB/s; refresh in ms: "
          + ", ".join(f"{name} {ms:.2f}" for name, ms in section["refresh_ms"].items()))  # fmt: skip
    unquantised = {row["batch"]: row["step_ms"] for row in section["decode"] if row["recipe"] == "none"}
    rows = [
        [row["recipe"], row["batch"], round(row["step_ms"], 3), round(row["roofline_ms"], 3),
         round(row["step_ms"] / row["roofline_ms"], 2), round(unquantised[row["batch"]] / row["step_ms"], 2)]
        for row in section["decode"]
    ]  # fmt: skip
    print(format_table(["recipe", "batch", "step ms", "roofline ms", "step / roofline", "speed / bf16"], rows))
    rows = [
        [row["linear"], row["batch"], round(row["bf16_us"], 1), round(row["fp8_us"], 1),
         round(row["fp8_roofline_us"], 1), round(row["bf16_us"] / row["fp8_us"], 2)]
        for row in section["products"]
    ]  # fmt: skip
    print(format_table(["linear", "batch", "bf16 us", "fp8 us", "fp8 roofline us", "bf16 / fp8"], rows))
