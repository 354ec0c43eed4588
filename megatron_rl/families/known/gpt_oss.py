"""gpt-oss: attention sinks, windows in every other layer, biases everywhere, experts with clamped gates, in MXFP4."""

from __future__ import annotations

from megatron_rl.families.architecture import Architecture
from megatron_rl.families.family import SMALL, Family, read_decoder
from megatron_rl.families.hf_config import HfConfig
from megatron_rl.families.rotation import read_rotation
from megatron_rl.families.weights import Entry, Piece, WeightMap, decoder_weights


def _read(config: HfConfig) -> Architecture:
    config.expect("swiglu_alpha", 1.702, why="the gate is x sigmoid(1.702 x)")
    config.expect("experts_per_token", config.get("num_experts_per_tok"), why="num_experts_per_tok says otherwise")
    for key in ("num_key_value_heads", "head_dim", "num_attention_heads", "num_local_experts", "num_experts_per_tok"):
        config.whole(key)  # their defaults are no function of the other sizes
    return read_decoder(
        config,
        quantization="mxfp4",
        rotation=read_rotation(config, base=150000.0),
        add_bias_linear=True,
        softmax_type="learnable",
        norm_epsilon=config.number("rms_norm_eps", 1e-5),
        num_experts=config.whole("num_local_experts"),
        moe_ffn_hidden_size=config.whole("intermediate_size"),
        moe_router_topk=config.whole("num_experts_per_tok"),
        swiglu=False,
        quick_geglu=True,
        activation_func_clamp_value=config.number("swiglu_limit", 7.0),
        glu_linear_offset=1.0,
        **config.windows(config.whole("num_hidden_layers"), every=2),
    )


def _weights(model: Architecture) -> WeightMap:
    """Describe stacked experts: transposed matrices, with alternating rows of gate and up projection."""
    found = decoder_weights(model, {"router": "router"})
    count, hidden, width = model.num_experts, model.hidden_size, model.moe_ffn_hidden_size

    def entry(name: str, expert: int, shape: tuple[int, ...], step: int) -> Entry:
        rows, is_matrix = shape[-1], len(shape) == 2
        pieces = (Piece(name, (start, rows), None, step, expert, is_matrix) for start in range(step))
        return Entry({name: (count, *shape)}, tuple(pieces))

    for layer in range(model.num_layers):
        stack = f"model.layers.{layer}.mlp.experts"
        for expert in range(count):
            ours = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}"
            found[f"{ours}.linear_fc1.weight"] = entry(f"{stack}.gate_up_proj", expert, (hidden, 2 * width), 2)
            found[f"{ours}.linear_fc1.bias"] = entry(f"{stack}.gate_up_proj_bias", expert, (2 * width,), 2)
            found[f"{ours}.linear_fc2.weight"] = entry(f"{stack}.down_proj", expert, (width, hidden), 1)
            found[f"{ours}.linear_fc2.bias"] = entry(f"{stack}.down_proj_bias", expert, (hidden,), 1)
    return found


_SMALL = {
    **SMALL, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 16,
    "attention_bias": True, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 64,
}  # fmt: skip

FAMILY = Family(
    name="gpt_oss",
    class_name="GptOssForCausalLM",
    title="gpt-oss",
    read=_read,
    weights=_weights,
    examples=(
        {**_SMALL, "swiglu_limit": 1.0, "max_position_embeddings": 2048, "rope_parameters": _YARN},
        {
            **_SMALL, "layer_types": ["full_attention"] * 2, "num_key_value_heads": 1, "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        },
    ),
)  # fmt: skip
