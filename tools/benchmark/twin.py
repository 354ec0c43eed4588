"""The same model in Hugging Face transformers: same shape, same weights."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from megatron_rl.models import PolicyModel


def hugging_face_twin(policy: PolicyModel, max_length: int) -> Qwen2ForCausalLM:
    """A Qwen2 with the policy's weights; attention by torch's SDPA, the fastest it has on a CPU."""
    config = policy.config
    twin = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=policy.padded_vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.ffn_hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_query_groups,
            max_position_embeddings=max_length,
            rms_norm_eps=config.layernorm_epsilon,
            tie_word_embeddings=False,
            use_sliding_window=False,
            attn_implementation="sdpa",
        )
    )
    twin.load_state_dict(_translate(policy), strict=True)
    return twin


@torch.no_grad()
def _translate(policy: PolicyModel) -> dict[str, Tensor]:
    source, config = policy.gpt.state_dict(), policy.config
    weights = {
        "model.embed_tokens.weight": source["embedding.word_embeddings.weight"],
        "model.norm.weight": source["decoder.final_layernorm.weight"],
        "lm_head.weight": source["output_layer.weight"],
    }
    for layer in range(config.num_layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        gate, up = source[ours + "mlp.linear_fc1.weight"].chunk(2)
        weights |= {
            theirs + "input_layernorm.weight": source[ours + "input_layernorm.weight"],
            theirs + "post_attention_layernorm.weight": source[ours + "pre_mlp_layernorm.weight"],
            theirs + "self_attn.o_proj.weight": source[ours + "self_attention.linear_proj.weight"],
            theirs + "mlp.gate_proj.weight": gate,
            theirs + "mlp.up_proj.weight": up,
            theirs + "mlp.down_proj.weight": source[ours + "mlp.linear_fc2.weight"],
        }
        for kind in ("weight", "bias"):
            fused = source[f"{ours}self_attention.linear_qkv.{kind}"]
            for name, part in _split_qkv(fused, config.num_query_groups, config.kv_channels).items():
                weights[f"{theirs}self_attn.{name}_proj.{kind}"] = part
    return {name: weight.clone() for name, weight in weights.items()}


def _split_qkv(fused: Tensor, groups: int, width: int) -> dict[str, Tensor]:
    """Megatron stores q.. k v of one group after the other: [groups * (queries + 2) * width, ...]."""
    rows = fused.view(groups, -1, width, *fused.shape[1:])
    parts = {"q": rows[:, :-2], "k": rows[:, -2:-1], "v": rows[:, -1:]}
    return {name: part.reshape(-1, *fused.shape[1:]) for name, part in parts.items()}
