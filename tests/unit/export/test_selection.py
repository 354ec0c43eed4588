"""Which tensors are converted."""

from __future__ import annotations

import pytest

from megatron_rl.checkpoint.hf.quantize import is_converted, modules_left_alone


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.11.self_attn.o_proj.weight",
        "model.layers.3.self_attn.qkv_proj.weight",
        "model.layers.3.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.gate_up_proj.weight",
        "model.layers.0.mlp.experts.17.down_proj.weight",
        "model.layers.0.mlp.shared_expert.up_proj.weight",
        "model.layers.0.mlp.shared_experts.up_proj.weight",
        "model.layers.0.block_sparse_moe.experts.3.w2.weight",
        "model.language_model.layers.0.mlp.up_proj.weight",
    ],
)
def test_linear_layers_of_the_decoder_are(name: str) -> None:
    assert is_converted(name, (256, 128))
    assert not is_converted(name, (256,))
    assert not is_converted(name, (4, 256, 128))
    assert not is_converted(name.replace(".weight", ".bias"), (256, 128))


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.shared_expert_gate.weight",
        "model.layers.0.block_sparse_moe.gate.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight",
        "model.visual.blocks.0.mlp.up_proj.weight",
        "multi_modal_projector.layers.0.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
    ],
)
def test_everything_else_is_not(name: str) -> None:
    assert not is_converted(name, (256, 128))


def test_loaders_are_told_of_routers_but_not_of_embeddings_and_norms() -> None:
    kept = [
        ("model.embed_tokens.weight", (320, 128)),
        ("model.layers.10.mlp.gate.weight", (4, 128)),
        ("model.layers.2.mlp.gate.weight", (4, 128)),
        ("model.layers.2.mlp.experts.gate_up_proj", (4, 128, 256)),
        ("model.layers.2.self_attn.q_proj.bias", (128,)),
        ("model.norm.weight", (128,)),
    ]
    modules = ["lm_head", "model.layers.2.mlp.experts", "model.layers.2.mlp.gate", "model.layers.10.mlp.gate"]
    assert modules_left_alone(kept) == modules
    assert modules_left_alone([]) == modules_left_alone([("lm_head.weight", (320, 128))]) == ["lm_head"]
