"""Rollouts on pipeline stages: CPU seconds of each rank, and the share of the time in which it waits for the others.

    torchrun --nproc-per-node=2 -m tools.benchmark.stages --shape 512x8     # as many stages as ranks
    python -m tools.benchmark.stages --shape 512x8                          # one rank, to compare with

Only on a machine that nobody else uses is the time that a rank waits a bubble. The work is that of the first round,
which does not count, over and over.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from megatron_rl.inference.engine import EngineOptions
from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.inference.staged import StagedEngine
from megatron_rl.models.gpt import build_model
from megatron_rl.platform import current_platform
from megatron_rl.platform.collectives import gather_json
from tools.benchmark.common import (
    benchmark_config,
    command_line,
    random_prompts,
    ranks_of,
    ranks_started,
    report,
    rollout_flags,
)
from tools.benchmark.rollout import Workload, engine_contender


def main(argv: Sequence[str] | None = None) -> None:
    """Measure on every rank; the first one reports."""
    parser = command_line("stages", shape="512x8", vocab=512, rounds=3)
    rollout_flags(parser, group=4)
    arguments = parser.parse_args(argv)
    ranks, length = ranks_started(), arguments.prompt_tokens + arguments.new_tokens
    config = benchmark_config(arguments.shape, length, f"--pipeline-model-parallel-size={ranks}", world_size=ranks)
    with ranks_of(config, arguments.seed) as groups:
        policy = build_model(config, current_platform(), arguments.vocab)
        prompts = random_prompts(arguments.batch // arguments.group, arguments.prompt_tokens, arguments.vocab, 1)
        workload = Workload(prompts, arguments.group, arguments.new_tokens, greedy=False)
        options, measured = EngineOptions(arguments.batch, length), []
        engine = (
            StagedEngine(policy, options, [], str, groups) if ranks > 1 else RolloutEngine(policy, options, [], str)
        )
        generate = engine_contender(engine, policy, workload)
        for _ in range(arguments.rounds + 1):
            wall, cpu = time.perf_counter(), time.process_time()
            generate(arguments.seed, False)
            measured.append((time.process_time() - cpu, time.perf_counter() - wall))
        columns = [statistics.median(column) for column in zip(*measured[1:], strict=True)]
        everyone = gather_json(columns, groups.pipeline_group)
        if groups.is_main:
            rows = [[f"{cpu:.2f}", f"{wall:.2f}", f"{1 - cpu / wall:.0%}"] for cpu, wall in everyone]
            report("stages", arguments, ["CPU s of a stage", "wall s", "waits"], rows, cpu_and_wall_seconds=everyone)


if __name__ == "__main__":
    main()
