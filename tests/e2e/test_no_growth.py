"""Fifty rollouts and updates leave nothing behind."""

from __future__ import annotations

import pytest

from tests.support.ranks import run_ranks

STEPS = 50
WARM = slice(10, 20)
"""By then caches that fill once are full: kernels, buffers as long as the longest batch, names of metrics."""
LATE = slice(40, STEPS)
FEWER_TENSORS = LATE.start - WARM.stop
"""A leak is a tensor a step. megatron keeps rotary tables of the last 32 lengths, and late steps meet new ones."""
MOST_RESIDENT = 16 * 2**20
"""Bytes by which the process may grow in thirty steps; the allocator itself moves some MiB to and fro."""
CHANGES = {
    "rl_rollout_quantization": "int8", "rl_offload_optimizer_during_inference": True, "grpo_kl_beta": 0.01,
    "eval_interval": 10, "rl_prompts_per_eval": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(CHANGES, id="all memory moves"),
        pytest.param({}, id="plain", marks=pytest.mark.long),
        pytest.param(
            CHANGES | {"rl_rollout_quantization": "int8_smooth", "bf16": True, "use_distributed_optimizer": True},
            id="bf16",
            marks=pytest.mark.long,
        ),
    ],
)
def test_fifty_steps(workshop, flags: dict[str, object]) -> None:
    """Tensors and bytes at the end of a step are those of a step long before; the KV cache goes and comes each time."""
    name = "-".join(["cycles", *map(str, flags.values())])
    runs = [workshop.rl(name, train_iters=STEPS, save_interval=20, **flags)]
    ((found,),) = run_ranks("tests.support.memory_runs:watched_runs", 1, runs=runs, tight=bool(flags))
    assert found["code"] == 0, found["output"][-4000:]
    assert found["released"] == bool(flags)
    assert found["generation"] >= (STEPS if flags else 0)
    seen = found["steps"][-STEPS:]  # an evaluation before the first step is one more
    assert len(seen) == STEPS
    warm, late = ({what: max(step[what] for step in seen[part]) for what in seen[0]} for part in (WARM, LATE))
    assert late["tensors"] < warm["tensors"] + FEWER_TENSORS
    assert late["bytes"] <= 1.02 * warm["bytes"]
    assert late["resident"] <= warm["resident"] + MOST_RESIDENT
