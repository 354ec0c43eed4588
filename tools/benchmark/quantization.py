"""Quantised rollouts: what a refresh of the copies costs, what the engine gains or loses, how much memory they take.

    python -m tools.benchmark.quantization                      every section
    python -m tools.benchmark.quantization refresh memory       some of them
    python -m tools.benchmark.quantization --quick              a small one in seconds, for tests

They measure a CPU, in CPU seconds of one thread, all contenders in turns; beside a GPU they need
``CUDA_VISIBLE_DEVICES=`` and otherwise say so. A GPU is measured by ``gpu.py``.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rl.inference import RolloutEngine
from megatron_rl.inference.options import EngineOptions
from megatron_rl.metrics.table import format_table
from megatron_rl.models import PolicyModel, build_model
from megatron_rl.platform import Platform
from megatron_rl.quantization.linears import QuantizedLinears, parallel_linears
from megatron_rl.quantization.rollout import RolloutQuantization
from megatron_rl.registry import RECIPES
from tools.benchmark.common import (
    Shape,
    benchmark_config,
    compete,
    one_rank,
    prepare,
    provenance,
    random_prompts,
    summarise,
    write_record,
)
from tools.benchmark.rollout import Workload, engine_contender

MEASURED = ("int8", "int8_smooth", "fp8", "fp8_block", "fp8_block_pow2", "fp8_tensor")
BF16_MEASURED = ("int8", "fp8")
"""Also measured on a bf16 model."""
SECTIONS = ("refresh", "rollout", "memory")


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    copies: tuple[Shape, ...]
    """Models whose weights are copied: refresh and memory."""
    rollouts: tuple[Shape, ...]
    batch: int
    prompt_tokens: int
    new_tokens: int
    rounds: int
    turn_seconds: float
    """Each contender runs at least that long a round."""

    @property
    def seq_length(self) -> int:
        """Of the rollouts."""
        return self.prompt_tokens + self.new_tokens


FULL = Sizes(
    copies=(Shape(64, 4), Shape(512, 4), Shape(1024, 4)),
    rollouts=(Shape(64, 3), Shape(512, 2), Shape(1024, 2)),
    batch=32,
    prompt_tokens=8,
    new_tokens=9,
    rounds=5,
    turn_seconds=0.3,
)
QUICK = Sizes(
    copies=(Shape(32, 1),),
    rollouts=(Shape(32, 1),),
    batch=8,
    prompt_tokens=3,
    new_tokens=4,
    rounds=1,
    turn_seconds=0.01,
)
GROUP = 8
VOCAB = 512


# -- refresh -----------------------------------------------------------------------------------


def refresh_section(sizes: Sizes, platform: Platform) -> dict[str, Any]:
    """Bytes of parameters that become quantised copies, a CPU second, beside a plain copy of the same weights."""
    return {_label(shape): _refresh(shape, sizes, platform) for shape in sizes.copies}


def _refresh(shape: Shape, sizes: Sizes, platform: Platform) -> dict[str, Any]:
    policy = build_model(benchmark_config(shape, 16), platform, VOCAB)
    weights = [module.weight for module in parallel_linears(policy.gpt).values()]
    buffers = [torch.empty_like(weight, requires_grad=False) for weight in weights]
    size = sum(weight.nbytes for weight in weights)

    @torch.no_grad()
    def copy(_: int) -> int:
        for weight, buffer in zip(weights, buffers, strict=True):
            buffer.copy_(weight)
        return size

    def refresh(linears: QuantizedLinears) -> Callable[[int], int]:
        return lambda _: (linears.refresh(), size)[1]

    contenders = {name: refresh(QuantizedLinears(policy.gpt, RECIPES.get(name))) for name in MEASURED}
    rounds = compete({"copy": copy, **contenders}, sizes.rounds, sizes.turn_seconds)
    return {"weight_bytes": size, **summarise(rounds, "copy", "bytes")}


def print_refresh(section: dict[str, Any]) -> None:
    """A line a recipe: GB/s, and how many plain copies a refresh costs."""
    rows = [
        [shape, name, round(speed / 1e9, 3), record["ratio"].get(f"copy/{name}", 1.0)]
        for shape, record in section.items()
        for name, speed in record["bytes_per_cpu_second"].items()
    ]
    print("\nrefresh: fp32 parameters read, GB / CPU s")
    print(format_table(["shape", "recipe", "GB / CPU s", "copies it costs"], rows))


# -- rollout -----------------------------------------------------------------------------------


def rollout_section(sizes: Sizes, platform: Platform) -> dict[str, Any]:
    """Tokens a CPU second of the engine by recipe, on fp32 and bf16 models with the same shape."""
    return {_label(shape): _rollout(shape, sizes, platform) for shape in sizes.rollouts}


def _rollout(shape: Shape, sizes: Sizes, platform: Platform) -> dict[str, Any]:
    contenders: dict[str, Callable[[int], int]] = {}
    for dtype, flags, recipes in (("fp32", [], MEASURED), ("bf16", ["--bf16"], BF16_MEASURED)):
        policy = build_model(benchmark_config(shape, sizes.seq_length, *flags), platform, VOCAB)
        for recipe in ("none", *recipes):
            contenders[f"{recipe} {dtype}"] = quantised_contender(policy, recipe, sizes)
    rounds = compete(contenders, sizes.rounds, sizes.turn_seconds)
    summary = summarise(rounds, "none fp32")
    ratios = [speeds["int8 bf16"] / speeds["none bf16"] for speeds in rounds]
    return {**summary, "int8_bf16_over_none_bf16": statistics.median(ratios)}


def quantised_contender(policy: PolicyModel, recipe: str, sizes: Sizes) -> Callable[[int], int]:
    """The engine inside ``RolloutQuantization``, as a run has it: calibrated and audited by the untimed run."""
    quantization = RolloutQuantization(policy.gpt, recipe, (), policy.config.num_layers, lambda rows: None)
    engine = RolloutEngine(policy, EngineOptions(sizes.batch, sizes.seq_length), [], str)
    prompts = random_prompts(sizes.batch // GROUP, sizes.prompt_tokens, VOCAB, seed=1)
    workload = Workload(prompts, GROUP, sizes.new_tokens, greedy=False)
    generate = engine_contender(engine, policy, workload)

    def contend(seed: int) -> int:
        with quantization.rollout(lambda: generate(0, False)):
            answers = generate(seed, False)
        return sum(len(answer) for answer in answers)

    return contend


def print_rollout(section: dict[str, Any]) -> None:
    """A line a contender; the ratio is above 1 where it is faster than the unquantised fp32 model."""
    rows = [
        [shape, name, round(speed), 1 / record["ratio"].get(f"none fp32/{name}", 1.0)]
        for shape, record in section.items()
        for name, speed in record["tokens_per_cpu_second"].items()
    ]
    print("\nrollout: tokens / CPU s")
    print(format_table(["shape", "recipe and model", "tokens / CPU s", "speed / fp32"], rows))


# -- memory ------------------------------------------------------------------------------------


def memory_section(sizes: Sizes, platform: Platform) -> dict[str, Any]:
    """Bytes of the linears' weights in bf16, of their quantised copies, and of the operand that CPUs multiply."""
    section = {}
    for shape in sizes.copies:
        gpt = build_model(benchmark_config(shape, 16), platform, VOCAB).gpt
        section[_label(shape)] = {name: memory(QuantizedLinears(gpt, RECIPES.get(name))) for name in MEASURED}
    return section


def memory(linears: QuantizedLinears) -> dict[str, float]:
    """Bytes by use."""
    operands = [layer.weight.operand for layer in linears.layers]
    bf16 = 2 * linears.num_weights
    return {
        "bf16_weights": bf16,
        "copies": linears.stored_bytes,
        "cpu_operand": sum(operand.nbytes for operand in operands if operand is not None),
        "copies_over_bf16": linears.stored_bytes / bf16,
    }


def print_memory(section: dict[str, Any]) -> None:
    """A line a recipe, in MiB."""
    rows = [
        [shape, name, *(round(use[kind] / 2**20, 2) for kind in ("bf16_weights", "copies", "cpu_operand")),
         round(use["copies_over_bf16"], 3)]
        for shape, recipes in section.items()
        for name, use in recipes.items()
    ]  # fmt: skip
    print("\nmemory: MiB")
    print(format_table(["shape", "recipe", "bf16 weights", "copies", "fp32 operand (CPU)", "copies / bf16"], rows))


# -- the command -------------------------------------------------------------------------------


def run(sections: Sequence[str], sizes: Sizes) -> dict[str, Any]:
    """Measure the sections in order and print each when it is done."""
    prepare()
    made: dict[str, Any] = {}
    steps = {
        "refresh": (refresh_section, print_refresh),
        "rollout": (rollout_section, print_rollout),
        "memory": (memory_section, print_memory),
    }
    for name in (name for name in SECTIONS if name in sections):
        if torch.cuda.is_available():
            made[name] = {"skipped": "CPU seconds mean nothing on a GPU: set CUDA_VISIBLE_DEVICES="}
            print(f"\n{name}: skipped, {made[name]['skipped']}")
            continue
        measure, show = steps[name]
        with one_rank() as (platform, _):
            made[name] = measure(sizes, platform)
        show(made[name])
    return made


def _label(shape: Shape) -> str:
    return f"{shape.hidden}x{shape.layers}"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmark.quantization")
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; all without one")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round: whether it works, not how fast")
    parser.add_argument("--json", type=Path, help="write the record here")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"there is no section {unknown[0]!r}; use one of {', '.join(SECTIONS)}")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print tables, write the record."""
    arguments = parse(argv)
    sizes = QUICK if arguments.quick else FULL
    origin = provenance("quantization")  # before: the checkout may move on during minutes of measuring
    made = run(arguments.sections or SECTIONS, sizes)
    write_record(arguments.json, {**made, "settings": asdict(sizes), **origin})


if __name__ == "__main__":
    main()
