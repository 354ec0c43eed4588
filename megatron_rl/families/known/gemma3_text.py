"""Gemma 3, text only: sliding windows in five of six layers, with another rotation; norms before and after blocks."""

from __future__ import annotations

from functools import partial

from megatron_rl.families.architecture import Architecture
from megatron_rl.families.family import SMALL, Family, read_decoder
from megatron_rl.families.hf_config import HfConfig
from megatron_rl.families.rotation import rotations_by_kind
from megatron_rl.families.weights import decoder_weights

_BASE, _LOCAL_BASE, _EVERY, _QUERY_WIDTH = 1e6, 1e4, 6, 256
"""transformers' defaults, which published files omit."""
_NAMES = {
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "self_attention.post_layernorm": "post_attention_layernorm",
    "mlp.post_layernorm": "post_feedforward_layernorm",
}


def _read(config: HfConfig) -> Architecture:
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        config.expect(key, why="logits and scores are not capped")
    config.expect("use_bidirectional_attention", False, why="tokens attend to what is before them only")
    for key in ("num_key_value_heads", "head_dim", "num_attention_heads"):
        config.whole(key)  # their defaults are no function of the other sizes
    return read_decoder(
        config,
        activation="gelu_pytorch_tanh",
        rotation=rotations_by_kind(config, _BASE, config.base("rope_local_base_freq", _LOCAL_BASE)),
        untie_embeddings_and_output_weights=not config.switch("tie_word_embeddings", True),
        softmax_scale=config.number("query_pre_attn_scalar", _QUERY_WIDTH) ** -0.5,
        qk_layernorm=True,
        swiglu=False,
        geglu=True,
        apply_layernorm_1p=True,
        sandwich_norm=True,
        scale_embedding=True,
        **config.windows(config.whole("num_hidden_layers"), every=config.whole("sliding_window_pattern", _EVERY)),
    )


_SMALL = {
    **SMALL, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip

FAMILY = Family(
    name="gemma3_text",
    class_name="Gemma3ForCausalLM",
    title="Gemma 3, text only",
    read=_read,
    weights=partial(decoder_weights, renamed=_NAMES),
    examples=(
        {
            **_SMALL,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        {**_SMALL, "num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2, "num_key_value_heads": 1},
    ),
)
