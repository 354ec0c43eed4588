"""What `--rl-offload-optimizer-during-inference` costs a rollout: seconds and GiB/s there and back.

    python -m tools.benchmark.offload --shape 512x8
    python -m tools.benchmark.offload --shape 4096x16 --rounds 10      on a GPU: also the device memory it frees

bf16 parameters, fp32 main parameters and moments, as the distributed optimizer keeps them. Without a GPU both
sides are the same memory: the figure is that of a copy, in CPU seconds of one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_rl.metrics.table import format_table
from megatron_rl.models import build_model
from megatron_rl.parallel import initialize, seed_everything, shut_down
from megatron_rl.platform import Platform, current_platform
from megatron_rl.trainer import Optimization
from megatron_rl.trainer.offload import OptimizerOffload, gradient_storages, state_storages
from tools.benchmark.common import Shape, benchmark_config, prepare, provenance, write_record


def main() -> None:
    """Measure and print; ``--json FILE`` also writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Shape.parse, default=Shape(512, 8), help="hidden size x layers")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    prepare()
    platform = current_platform()
    config = benchmark_config(arguments.shape, 128, "--bf16", "--use-distributed-optimizer")
    initialize(config.parallel, platform)
    seed_everything(1)
    try:
        optimization = _with_moments(Optimization(build_model(config, platform, arguments.vocab), config))
        record = provenance("offload") | measure(optimization, platform, arguments.rounds)
    finally:
        shut_down()
    rows = [(name, f"{value:.4g}") for name, value in record.items() if isinstance(value, float)]
    print(format_table(("figure", "value"), rows))
    write_record(arguments.json, record)


def _with_moments(optimization: Optimization) -> Optimization:
    """The state after a first update, with gradients of one value."""
    optimization.zero_grad()
    for buffer in optimization.wrapped.buffers:
        buffer.grad_data.fill_(1e-3)
    assert optimization.step().applied
    return optimization


def measure(optimization: Optimization, platform: Platform, rounds: int) -> dict[str, float]:
    """Medians over ``rounds``, after one that takes the host memory."""
    mover = OptimizerOffload(optimization)
    moved = sum(storage.nbytes() for storage in state_storages(optimization))
    given_up = sum(storage.nbytes() for storage in gradient_storages(optimization))
    first_leave = _seconds(mover.leave, platform)
    _seconds(mover.come_home, platform)
    before, leave, home, freed = _allocated(platform), [], [], []
    for _ in range(rounds):
        leave.append(_seconds(mover.leave, platform))
        freed.append(before - _allocated(platform))
        home.append(_seconds(mover.come_home, platform))
    figures = {
        "state MiB": moved / 2**20,
        "gradients MiB": given_up / 2**20,
        "first leave s": first_leave,
        "leave s": statistics.median(leave),
        "come home s": statistics.median(home),
        "leave GiB/s": moved / 2**30 / statistics.median(leave),
        "come home GiB/s": moved / 2**30 / statistics.median(home),
    }
    return figures | ({"device MiB freed": min(freed) / 2**20} if platform.is_cuda else {})


def _allocated(platform: Platform) -> int:
    return torch.cuda.memory_allocated(platform.device) if platform.is_cuda else 0


def _seconds(move: Callable[[], None], platform: Platform) -> float:
    """To the end of the copies on a GPU; CPU seconds without one."""
    clock = time.perf_counter if platform.is_cuda else time.process_time
    platform.synchronize()
    started = clock()
    move()
    platform.synchronize()
    return clock() - started


if __name__ == "__main__":
    main()
