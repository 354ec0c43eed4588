"""Rules of latent attention."""

from __future__ import annotations

import pytest

from megatron_rl.config.arguments import read_config
from tests.support.tiny import FLAGS, LATENT


def problems(ranks: int = 1, **changes: object) -> list[str]:
    flags = FLAGS | {name.replace("_", "-"): value for name, value in (LATENT | changes).items()}
    argv = []
    for name, value in flags.items():
        if value is not False:
            argv += [f"--{name}"] if value is None or value is True else [f"--{name}", str(value)]
    return [problem.text for problem in read_config(argv, ranks)[1]]


@pytest.mark.parametrize(
    ("ranks", "changes", "fragment"),
    [
        (1, {"kv_lora_rank": False}, "--kv-lora-rank is missing: --multi-latent-attention has no default sizes"),
        (1, {"qk_pos_emb_head_dim": 5, "kv_channels": 17}, "--qk-pos-emb-head-dim 5 is rotated in pairs"),
        (1, {"kv_channels": 8}, "--kv-channels 8 with --multi-latent-attention is the width of a whole query"),
        (3, {"tensor_model_parallel_size": 3, "hidden_size": 48, "num_attention_heads": 6, "ffn_hidden_size": 96},
         "--kv-lora-rank 16: ranks share the 20 rows of its projection, which tensor-parallel size 3 does not divide"),
        (1, {"num_query_groups": 2, "group_query_attention": True}, "--num-query-groups 2 with --multi-lat"),
        (1, {"window_size": 8}, "--window-size 8 is not built with --multi-latent-attention; leave it out"),
        (1, {"qk_layernorm": True}, "--qk-layernorm is not built with --multi-latent-attention; leave it out"),
        (1, {"lora_rank": 4}, "--lora-rank 4 is not built with --multi-latent-attention; leave it out"),
        (1, {"rl_kv_cache_dtype": "fp8"}, "--rl-kv-cache-dtype fp8 is not built with --multi-latent-at"),
        (1, {"rl_kv_cache_dtype": "bf16"}, "--rl-kv-cache-dtype bf16 is not built with"),
        (1, {"multi_latent_attention": False}, "--kv-lora-rank 16 has no effect without --multi-latent-attention"),
    ],
)  # fmt: skip
def test_what_is_not_built_is_refused_by_name(ranks: int, changes: dict[str, object], fragment: str) -> None:
    found = problems(ranks, **changes)
    assert any(fragment in line for line in found), found


def test_it_is_built_as_it_is() -> None:
    assert problems() == []
    assert problems(beta_fast=1.0) == [], "the bounds of Kimi-K2's YaRN are equal"
    assert any("--beta-fast 0.5 must be at least --beta-slow 1" in line for line in problems(beta_fast=0.5))
    assert problems(no_rl_mla_absorb=True, rl_rollout_quantization="int8", attention_backend="paged") == []


@pytest.mark.parametrize(
    "flags",
    [
        "--lora-rank 4",
        "--inference-dynamic-batching-buffer-size-gb 0.1 --inference-max-seq-length 64 --perform-rl-step",
        "--transformer-impl transformer_engine --bf16 --fp8-format e4m3 --fp8-recipe blockwise",
    ],
)
def test_nobody_looks_at_a_shape_without_its_sizes(flags: str) -> None:
    shape = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --swiglu"
    _, found = read_config(f"{shape} --multi-latent-attention {flags}".split(), 1)
    assert sum("has no default sizes" in str(problem) for problem in found) == 4
