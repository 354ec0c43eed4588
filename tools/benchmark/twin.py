"""The same model in Hugging Face transformers: same shape, same weights."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import replace

from transformers import Qwen2Config, Qwen2ForCausalLM

from megatron_rl.checkpoint.hf.save import tensors_of
from megatron_rl.families.weights import decoder_weights
from megatron_rl.models.gpt import PolicyModel


def hugging_face_twin(policy: PolicyModel, max_length: int) -> Qwen2ForCausalLM:
    """A Qwen2 with the policy's weights; attention by torch's SDPA, the fastest it has on a CPU."""
    config = policy.config
    twin = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=policy.padded_vocab_size, hidden_size=config.hidden_size,
            intermediate_size=config.ffn_hidden_size, num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_attention_heads, num_key_value_heads=config.num_query_groups,
            max_position_embeddings=max_length, rms_norm_eps=config.layernorm_epsilon, attn_implementation="sdpa",
        )  # fmt: skip
    )
    layout, parameters = policy.layout, dict(policy.named_parameters())
    weights = decoder_weights(replace(layout.architecture, vocab_size=layout.padded_vocab_size))
    tensors = [tensors_of(weights[each.name], each, parameters[each.name].detach()) for each in layout.parameters]
    twin.load_state_dict(dict(ChainMap(*tensors)))
    return twin
