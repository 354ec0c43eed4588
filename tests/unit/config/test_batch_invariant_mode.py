"""What `--batch-invariant-mode` is refused with: one line each, before a model is built."""

from __future__ import annotations

import pytest

MODE = {"batch_invariant_mode": True, "bf16": True}
EXPERTS = {"num_experts": "4", "moe_router_topk": "2", "moe_ffn_hidden_size": "16"}
LATENT = {
    "multi_latent_attention": True, "kv_lora_rank": "8", "qk_head_dim": "8", "qk_pos_emb_head_dim": "4",
    "v_head_dim": "8",
}  # fmt: skip
ALIGNED = {"rl_train_forward": "quantized"}


@pytest.mark.parametrize(
    ("changes", "ranks", "word"),
    [
        ({"bf16": None}, 1, "needs --bf16"),
        ({"rl_rollout_quantization": "fp8"}, 1, "--rl-rollout-quantization fp8"),
        ({"rl_rollout_quantization": "fp8_block"} | ALIGNED, 1, "--rl-rollout-quantization fp8_block"),
        ({"rl_rollout_quantization": "int8"}, 1, "--rl-train-forward quantized"),
        ({"rl_kv_cache_dtype": "fp8"}, 1, "--rl-kv-cache-dtype"),
        ({"transformer_impl": "transformer_engine"}, 1, "--transformer-impl"),
        ({"lora_rank": "8"}, 1, "--lora-rank"),
        ({"rotary_percent": "0.5"}, 1, "--rotary-percent"),
        ({"context_parallel_size": "2"}, 2, "--context-parallel-size"),
        ({"rl_share_prompts": True}, 1, "--rl-share-prompts"),
        (EXPERTS, 1, "grouped GEMMs"),
        (LATENT, 1, "latents"),
    ],
)
def test_what_has_no_equal_bits_is_refused(problems, changes, ranks, word):
    (line,) = [line for line in problems(ranks, **MODE | changes) if "--batch-invariant-mode" in line]
    assert word in line and "\n" not in line
    assert not any("--batch-invariant-mode" in line for line in problems(ranks, **changes))


@pytest.mark.parametrize(
    "changes", [{}, {"tensor_model_parallel_size": "2"}, {"rl_rollout_quantization": "int8"} | ALIGNED]
)
def test_what_it_is_built_for(problems, changes):
    assert problems(2, **MODE | changes) == []
