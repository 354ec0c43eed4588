"""OLMo 2: norms after attention and MLP instead of before, and query and key norms over all heads."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron_rl.families.architecture import Architecture
from megatron_rl.families.family import SMALL, Family, read_decoder
from megatron_rl.families.hf_config import HfConfig
from megatron_rl.families.weights import decoder_weights

_NAMES = {
    "self_attention.post_layernorm": "post_attention_layernorm",
    "mlp.post_layernorm": "post_feedforward_layernorm",
}


def read_olmo(config: HfConfig, **settings: Any) -> Architecture:
    """Call `read_decoder` with the settings common to OLMo 2 and 3."""
    epsilon = config.number("rms_norm_eps", 1e-5)
    return read_decoder(
        config, norm_epsilon=epsilon, qk_layernorm=True, qk_layernorm_across_heads=True, post_norm=True, **settings
    )


olmo_weights = partial(decoder_weights, renamed=_NAMES)


FAMILY = Family(
    name="olmo2",
    class_name="Olmo2ForCausalLM",
    title="OLMo 2",
    read=read_olmo,
    weights=olmo_weights,
    examples=({**SMALL}, {**SMALL, "tie_word_embeddings": True, "num_key_value_heads": 4, "rope_theta": 500000.0}),
)
