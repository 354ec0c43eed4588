"""What fits no machine is refused before a model is built; what may fit one is not."""

from __future__ import annotations

import pytest

from megatron_rl.run.memory.estimate import size_problems
from tests.support.tiny import tiny_config

# 4 x 2^36 numbers for attention and 3 x 2^38 for the MLP, with gradients and moments 16 bytes each: 16 TiB.
WIDE = {
    "num_layers": 1, "hidden_size": 2**18, "ffn_hidden_size": 2**20, "num_attention_heads": 2**10,
    "num_query_groups": 2**10,
}  # fmt: skip
LONG = {"max_position_embeddings": 2**31 - 1, "rl_sequence_packing_bin_size": 2**31 - 1}
# 2 x 1000 layers x 4 heads of 2^16 numbers of 4 bytes are 2^30 x 1.953 bytes a token.
DEEP = {"num_layers": 1000, "kv_channels": 2**16, "num_query_groups": 4}


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        (WIDE, "weights, gradients and optimizer state take 16.0 TiB on each rank"),
        ({"vocab_size": 10**8, "seq_length": 2**20, "micro_batch_size": 1}, "logits of one bin take"),
        (LONG, "activations of one bin take"),
        (
            {**DEEP, "seq_length": 128, "micro_batch_size": 1, "rl_rollout_memory_fraction": 0.01},
            "free memory for one sequence at --rl-rollout-memory-fraction 0.01 take 24.4 TiB on each rank",
        ),
        ({**DEEP, "seq_length": 4096}, "the KV cache of one sequence take 7.8 TiB on each rank"),
    ],
    ids=["wide", "vocabulary", "long", "share", "deep"],
)
def test_what_no_machine_has(changes: dict[str, int], start: str) -> None:
    (line,) = [line for line in map(str, size_problems(tiny_config(**changes), 1)) if line.startswith(start)]
    assert "which is more than any machine has; " in line


@pytest.mark.parametrize("changes", [{}, {**DEEP, "seq_length": 128, "micro_batch_size": 1}])
def test_what_may_fit_one(changes: dict[str, int]) -> None:
    assert size_problems(tiny_config(**changes), 1) == []


def test_ranks_that_share_a_model() -> None:
    shared = {**WIDE, "tensor_model_parallel_size": 8, "grpo_prompts_per_step": 8}
    assert size_problems(tiny_config(8, **shared), 8) == []
