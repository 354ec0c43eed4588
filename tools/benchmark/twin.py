"""The same model in Hugging Face transformers: same shape, same weights."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import replace

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from megatron_rl.checkpoint.hf.save import tensors_of
from megatron_rl.families.weights import decoder_weights
from megatron_rl.models.gpt import PolicyModel


def hugging_face_twin(policy: PolicyModel, max_length: int) -> Qwen2ForCausalLM:
    """A Qwen2 with the policy's weights; attention by torch's SDPA, the fastest it has on a CPU."""
    twin = Qwen2ForCausalLM(_config(policy, max_length))
    twin.load_state_dict(_weights(policy))
    return twin


def twin_on_device(policy: PolicyModel, max_length: int) -> Qwen2ForCausalLM:
    """Build `hugging_face_twin` for inference, on the policy's device and in its dtype, without a copy on the host."""
    with torch.device("meta"):
        twin = Qwen2ForCausalLM(_config(policy, max_length)).eval().requires_grad_(False)
    with torch.device(policy.device):
        twin.load_state_dict(_weights(policy), strict=False, assign=True)
        twin.model.rotary_emb = Qwen2RotaryEmbedding(twin.config)  # its buffers are not among the weights
    if twin.config.tie_word_embeddings:
        twin.lm_head.weight = twin.model.embed_tokens.weight
    return twin


def _config(policy: PolicyModel, max_length: int) -> Qwen2Config:
    config = policy.config
    return Qwen2Config(
        vocab_size=policy.padded_vocab_size, hidden_size=config.hidden_size,
        intermediate_size=config.ffn_hidden_size, num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads, num_key_value_heads=config.num_query_groups,
        max_position_embeddings=max_length, rms_norm_eps=config.layernorm_epsilon, attn_implementation="sdpa",
        tie_word_embeddings=not policy.layout.architecture.untie_embeddings_and_output_weights,
    )  # fmt: skip


def _weights(policy: PolicyModel) -> dict[str, torch.Tensor]:
    layout, parameters = policy.layout, dict(policy.named_parameters())
    weights = decoder_weights(replace(layout.architecture, vocab_size=layout.padded_vocab_size))
    return dict(
        ChainMap(*(tensors_of(weights[each.name], each, parameters[each.name].detach()) for each in layout.parameters))
    )
