"""Rollouts on pipeline stages: CPU seconds of each rank, and the share of the time in which it waits for the others.

    torchrun --nproc-per-node=2 -m tools.benchmark.stages --shape 512x8     # as many stages as ranks
    python -m tools.benchmark.stages --shape 512x8                          # one rank, to compare with

Only on a machine that nobody else uses is the time that a rank waits a bubble. The work is that of the first round,
which does not count, over and over.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Sequence

import torch

from megatron_rl.inference.engine import Engine, EngineOptions
from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.inference.staged import StagedEngine
from megatron_rl.metrics.table import format_table
from megatron_rl.models import PolicyModel, build_model
from megatron_rl.parallel import ParallelGroups, initialize, seed_everything, shut_down
from megatron_rl.parallel.collectives import gather_json
from megatron_rl.platform import current_platform
from tools.benchmark.common import benchmark_config, command_line, random_prompts, record_of, write_record
from tools.benchmark.rollout import Workload, engine_contender


def build_engine(policy: PolicyModel, options: EngineOptions, groups: ParallelGroups) -> Engine:
    """Nothing ends before its limit."""
    if groups.pipeline_group.size() > 1:
        return StagedEngine(policy, options, [], str, groups)
    return RolloutEngine(policy, options, [], str)


def run(arguments: argparse.Namespace) -> None:
    """Measure on every rank; the first one reports."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ranks, length = int(os.environ.get("WORLD_SIZE", "1")), arguments.prompt_tokens + arguments.new_tokens
    sizes = f"--pipeline-model-parallel-size={ranks}"
    config, platform = benchmark_config(arguments.shape, length, sizes, world_size=ranks), current_platform()
    groups = initialize(config.parallel, platform)
    seed_everything(arguments.seed)
    policy = build_model(config, platform, arguments.vocab)
    prompts = random_prompts(arguments.batch // arguments.group, arguments.prompt_tokens, arguments.vocab, 1)
    workload = Workload(prompts, arguments.group, arguments.new_tokens, greedy=False)
    engine = build_engine(policy, EngineOptions(arguments.batch, length), groups)
    generate, measured = engine_contender(engine, policy, workload), []
    for _ in range(arguments.rounds + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        generate(arguments.seed, False)
        measured.append((time.process_time() - cpu, time.perf_counter() - wall))
    columns = [statistics.median(column) for column in zip(*measured[1:], strict=True)]
    everyone = gather_json(columns, groups.pipeline_group)
    if groups.is_main:
        rows = [[f"{cpu:.2f}", f"{wall:.2f}", f"{1 - cpu / wall:.0%}"] for cpu, wall in everyone]
        print(format_table(["CPU s of a stage", "wall s", "waits"], rows))
        found = {"cpu_seconds": [cpu for cpu, _ in everyone], "wall_seconds": [wall for _, wall in everyone]}
        write_record(arguments.json, record_of("stages", arguments, **found))
    shut_down()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the record."""
    parser = command_line("stages", shape="512x8", vocab=512, rounds=3)
    parser.add_argument("--batch", type=int, default=64, help="sequences decoded at once")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--group", type=int, default=4, help="sequences that share a prompt")
    run(parser.parse_args(argv))


if __name__ == "__main__":
    main()
