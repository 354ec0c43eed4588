"""Decode steps on one H200, on paper: the time to read their bytes once, and what is expected with today's kernels.

    python -m tools.benchmark.on_paper.decode   prints a table of docs/measurements/on_paper.md; nothing is measured

Expected is the sum of: weights, cache and logits at the shares of the copy rate that kernels reach; 2 us for a launch
in a CUDA graph, with the launches that `tests/unit/models/test_rollout_launches.py` counts; 12 us for each all-reduce.
"""

from __future__ import annotations

import sys

from megatron_rl.metrics.console import print_table
from tools.benchmark.on_paper.seconds import experts_hit
from tools.benchmark.on_paper.sizes import Model
from tools.benchmark.scaling import QWEN_30B_A3B, QWEN_32B

QWEN2 = "--seq-length 32768 --max-position-embeddings 32768 --kv-channels {} --num-layers {} --hidden-size {} "
MODELS = (
    (Model.of("0.5B", QWEN2.format(64, 24, 896) + "--ffn-hidden-size 4864 --num-attention-heads 14 "
              "--num-query-groups 2 --add-qkv-bias", 151936), 1, 1024),
    (Model.of("7B", QWEN2.format(128, 28, 3584) + "--ffn-hidden-size 18944 --num-attention-heads 28 "
              "--num-query-groups 4 --add-qkv-bias", 152064), 1, 1024),
    (QWEN_30B_A3B, 1, 1024),
    (QWEN_32B, 8, 4096),
)  # fmt: skip
"""With tensor-parallel ranks, and tokens in the cache of each row."""
BATCHES = (1, 32, 256)
RATE = 4.3e12
"""Bytes/s of a copy on an H200, read and write."""
REACHED = {"bf16": 0.87, "fp8": 0.72, "experts": 0.65, "cache": 0.65}
"""Share of it that products with few rows and attention reach."""
LAUNCH, REDUCE = 2e-6, 12e-6
DENSE, EXPERTS, BESIDE = {"bf16": 9, "fp8": 10}, {"bf16": 13, "fp8": 14}, 14
"""Launches of a layer, and of a step beside its layers."""


def decode(model: Model, ranks: int, batch: int, cached: int, form: str) -> tuple[float, float, int]:
    """Seconds to read the bytes once, expected seconds, and launches of a step of one rank."""
    size = 1 if form == "fp8" else 2
    dense = model.layers * (model.attention + model.dense) / ranks * size
    experts = model.layers * experts_hit(model, batch) * model.expert / ranks * size if model.experts else 0.0
    head = model.head * 2 / ranks
    cache = batch * cached * model.layers * model.cache_numbers(ranks) * 2
    logits = 3 * batch * model.head / model.hidden / ranks * 4
    launches = model.layers * (EXPERTS if model.experts else DENSE)[form] + BESIDE
    exchanges = 2 * model.layers * REDUCE if ranks > 1 else 0.0
    read = dense / REACHED[form] + experts / REACHED["experts"] + head / REACHED["bf16"] + cache / REACHED["cache"]
    floor = (dense + experts + head + cache) / RATE
    return floor, (read + logits) / RATE + launches * LAUNCH + exchanges, launches


def rows() -> list[tuple[str, ...]]:
    """A row of the table for each model and format."""
    found = []
    for model, ranks, cached in MODELS:
        for form in ("bf16", "fp8"):
            cells = [decode(model, ranks, batch, cached, form) for batch in BATCHES]
            name = f"{model.name}{f', TP {ranks}' if ranks > 1 else ''} {form}"
            times = [f"{floor * 1e3:.2f} → {time * 1e3:.2f} ({time / floor:.1f})" for floor, time, _ in cells]
            found.append((name, *times, str(cells[0][2])))
    return found


if __name__ == "__main__":
    print_table(sys.stdout, ("ms", *(f"batch {batch}" for batch in BATCHES), "launches"), rows())
