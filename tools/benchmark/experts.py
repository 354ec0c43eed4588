"""Tokens per CPU second with experts, in updates and rollouts: grouped products against megatron's loop over experts.

    python -m tools.benchmark.experts --shape 64x3 --experts 32

Both are our update and our engine, on models of the same weights. Experts are as wide as four of them together are the
shape's MLP, and every token goes through four.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from megatron_rl.config import RLConfig
from megatron_rl.inference.engine import EngineOptions
from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.models import build_model
from megatron_rl.parallel import ParallelGroups, seed_everything
from megatron_rl.platform import current_platform
from tools.benchmark.common import (
    SPEED,
    benchmark_config,
    command_line,
    compete,
    random_prompts,
    ranks_of,
    report,
    summarise,
    tokens_per_cpu_second,
)
from tools.benchmark.rollout import Workload, engine_contender
from tools.benchmark.update import make_samples, our_update

CHOSEN = 4
PROMPT, ANSWER = 16, 48
Work = Callable[[int], int]
"""Takes the number of the round; returns its tokens."""


def flags(arguments: argparse.Namespace, *extra: str) -> RLConfig:
    """Of a model with experts."""
    sizes = ("num-experts", arguments.experts), ("moe-router-topk", CHOSEN), ("micro-batch-size", 32)
    return benchmark_config(
        arguments.shape, PROMPT + ANSWER, "--use-distributed-optimizer", "--qk-layernorm",
        f"--moe-ffn-hidden-size={arguments.shape.ffn // CHOSEN}", *(f"--{name}={size}" for name, size in sizes), *extra,
    )  # fmt: skip


def contender(arguments: argparse.Namespace, config: RLConfig, groups: ParallelGroups) -> dict[str, Work]:
    """An update and a rollout of one model."""
    vocab = arguments.vocab
    seed_everything(arguments.seed)
    policy = build_model(config, current_platform(), vocab)
    samples = make_samples(arguments.rows, vocab, PROMPT, ANSWER, equal=False)
    prompts = random_prompts(arguments.rows // 8, PROMPT, vocab, arguments.seed)
    engine = RolloutEngine(policy, EngineOptions(arguments.rows, PROMPT + ANSWER), [], str)
    generate = engine_contender(engine, policy, Workload(prompts, 8, ANSWER, greedy=False))
    update = our_update(policy, config, groups)

    def updates(_: int) -> int:
        update(samples)
        return sum(sample.length for sample in samples)

    return {"update": updates, "rollout": lambda round_index: sum(map(len, generate(round_index, False)))}


def main() -> None:
    """Both measurements, in turns."""
    parser = command_line("experts", shape="64x3", vocab=256, rounds=7)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--rows", type=int, default=64, help="samples of an update, and rows of a decode step")
    arguments = parser.parse_args()
    configs = {"grouped": flags(arguments), "loop": flags(arguments, "--no-moe-grouped-gemm")}
    with ranks_of(configs["grouped"], arguments.seed) as groups:
        works = {name: contender(arguments, config, groups) for name, config in configs.items()}
        found = {}
        for kind in ("update", "rollout"):
            turns = {name: partial(tokens_per_cpu_second, work[kind]) for name, work in works.items()}
            found[kind] = summarise(compete(turns, arguments.rounds))
    rows = [[kind, *row["median"].values(), *row["ratio"].values()] for kind, row in found.items()]
    report("experts", arguments, [SPEED, *configs, "grouped / loop"], rows, **found)


if __name__ == "__main__":
    main()
