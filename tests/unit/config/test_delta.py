"""Rules of layers with a recurrent state."""

from __future__ import annotations

import pytest

from megatron_rl.config.arguments import read_config
from megatron_rl.families.architecture import linear_layers, linear_pattern
from tests.support.tiny import DELTA, DELTA_EXPERTS, FLAGS


def problems(ranks: int = 1, **changes: object) -> list[str]:
    flags = FLAGS | {name.replace("_", "-"): value for name, value in (DELTA | changes).items()}
    argv = []
    for name, value in flags.items():
        if value is not False:
            argv += [f"--{name}"] if value is None or value is True else [f"--{name}", str(value)]
    return [problem.text for problem in read_config(argv, ranks)[1]]


@pytest.mark.parametrize(
    ("ranks", "changes", "fragment"),
    [
        (1, {"linear_key_head_dim": False}, "--linear-key-head-dim is missing: --linear-attention-freq has no default"),
        (1, {"linear_num_value_heads": 3}, "--linear-num-value-heads 3 is no multiple of --linear-num-key-heads 2"),
        (1, {"linear_attention_freq": "often"}, "--linear-attention-freq often is neither a whole number"),
        (1, {"linear_attention_freq": "[1]*2"}, "--linear-attention-freq [1]*2 lists 2 layers where --num-layers is 3"),
        (1, {"linear_attention_freq": 1}, "--linear-attention-freq 1 gives no layer a state; leave it out"),
        (1, {"linear_attention_freq": 4}, "--linear-attention-freq 4: the model has no layer with attention"),
        (2, {"num_layers": 4, "linear_attention_freq": 4, "pipeline_model_parallel_size": 2},
         "--linear-attention-freq 4: pipeline stage 0 has no layer with attention, which is not built"),
        (4, {"tensor_model_parallel_size": 4},
         "--linear-num-key-heads 2 is not divisible by --tensor-model-parallel-size 4: ranks share whole heads"),
        (2, {"context_parallel_size": 2}, "--context-parallel-size 2 is not built with --linear-attention-freq; use 1"),
        (1, {"rl_share_prompts": True}, "--rl-share-prompts is not built with --linear-attention-freq; leave it out"),
        (1, {"lora_rank": 5}, "--lora-rank 5 is above the width of in_proj_b of layers.0.self_attention.in_proj"),
        (1, {"rl_kv_cache_dtype": "fp8"}, "--rl-kv-cache-dtype fp8 is not built with --linear-attention-freq"),
        (1, {"linear_attention_freq": False}, "--linear-key-head-dim 6 has no effect without --linear-attention-freq"),
    ],
)  # fmt: skip
def test_what_is_not_built_is_refused_by_name(ranks: int, changes: dict[str, object], fragment: str) -> None:
    found = problems(ranks, **changes)
    assert any(fragment in line for line in found), found


@pytest.mark.parametrize("changes", [{}, DELTA_EXPERTS, {"rl_rollout_quantization": "int8"}])
def test_it_is_built_as_it_is(changes: dict[str, object]) -> None:
    assert problems(**changes) == []


@pytest.mark.parametrize(
    ("pattern", "layers"), [("4", [1, 1, 1, 0, 1, 1]), (None, [0, 0]), ("([0]*1+[1]*2)", [0, 1, 1]), ("2", [1, 0, 1])]
)
def test_a_pattern_is_written_as_it_is_read(pattern: str | None, layers: list[int]) -> None:
    assert list(map(int, linear_layers(pattern, len(layers)))) == layers
    assert linear_pattern([bool(layer) for layer in layers]) == pattern
