"""Rules of attention: latent attention (MLA), layers with a recurrent state (gated delta rule), YaRN."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megatron_rl.config.flags import Finding, divisors, flags_of, without_effect
from megatron_rl.families.architecture import YARN, linear_layers
from megatron_rl.families.shape import SIZES_OF_LATENTS, DeltaRule, LatentAttention, RotationOptions

if TYPE_CHECKING:
    from megatron_rl.config.rl_config import RLConfig

_PLAIN = {
    "window_size": None, "softmax_type": "vanilla", "add_qkv_bias": False, "add_bias_linear": False,
    "transformer_impl": "local", "sandwich_norm": False, "post_norm": False, "scale_embedding": False,
}  # fmt: skip
_BESIDE_LATENTS = _PLAIN | {
    "qk_layernorm": False, "rotary_percent": 1.0, "lora_rank": None, "apply_layernorm_1p": False,
}  # fmt: skip
"""Settings with the one value that is built with latent attention."""
_BESIDE_STATES = _PLAIN | {
    "context_parallel_size": 1, "rl_share_prompts": False, "normalization": "RMSNorm", "swiglu": True,
    "multi_latent_attention": False, "qk_layernorm_across_heads": False,
}  # fmt: skip
"""Settings with the one value that is built with layers that have a recurrent state."""
_SIZES_OF_DELTA = (
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
    "linear_num_value_heads",
)  # fmt: skip


def _not_built(config: RLConfig, switch: str, built: Mapping[str, Any]) -> Iterator[Finding]:
    for name, value in built.items():
        if config.value(name) != value:
            yield name, f"is not built with {switch}; {'leave it out' if value in (None, False) else f'use {value}'}"
    if config.kv_cache_is_rounded:
        yield "rl_kv_cache_dtype", f"is not built with {switch}; use auto"


def latent_size_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Report sizes that latent attention needs, and that fit neither each other nor the tensor-parallel size."""
    latent, model, parts = config.latent, config.model, config.parallel.tensor_model_parallel_size
    if not latent.multi_latent_attention:
        names = [each.name for each in flags_of(LatentAttention) if each.name != "multi_latent_attention"]
        yield from without_effect(config, names, "--multi-latent-attention")
        return
    missing = [name for name in SIZES_OF_LATENTS if getattr(latent, name) is None]
    for name in missing:
        yield name, "is missing: --multi-latent-attention has no default sizes"
    if missing:
        return
    whole = latent.qk_head_dim + latent.qk_pos_emb_head_dim
    if latent.qk_pos_emb_head_dim % 2:
        yield "qk_pos_emb_head_dim", "is rotated in pairs; use an even number"
    if model.kv_channels != whole:
        yield "kv_channels", f"with --multi-latent-attention is the width of a whole query head; use {whole}"
    if model.num_query_groups != model.num_attention_heads:
        yield "num_query_groups", (
            f"with --multi-latent-attention: heads share a latent, not keys; use {model.num_attention_heads}"
        )
    widths = {"q_lora_rank": latent.q_lora_rank, "kv_lora_rank": latent.kv_lora_rank + latent.qk_pos_emb_head_dim}
    for name, width in widths.items():
        if width is not None and width % parts:
            yield name, (
                f": ranks share the {width} rows of its projection, which tensor-parallel size {parts} does not "
                f"divide; use --tensor-model-parallel-size {divisors(width)}"
            )


def latent_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Report what latent attention is not built with."""
    if config.latent.multi_latent_attention:
        yield from _not_built(config, "--multi-latent-attention", _BESIDE_LATENTS)


def delta_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Sizes that the delta rule needs, and what it is not built with."""
    delta = config.delta
    if delta.linear_attention_freq is None:
        yield from without_effect(config, [each.name for each in flags_of(DeltaRule)][1:], "--linear-attention-freq")
        return
    missing = [name for name in _SIZES_OF_DELTA if getattr(delta, name) is None]
    for name in missing:
        yield name, "is missing: --linear-attention-freq has no default sizes"
    if not missing and delta.linear_num_value_heads % delta.linear_num_key_heads:
        yield "linear_num_value_heads", (
            f"is no multiple of --linear-num-key-heads {delta.linear_num_key_heads}: key heads are shared evenly"
        )
    ranks = config.parallel.tensor_model_parallel_size
    if not missing and delta.linear_num_key_heads % ranks:
        yield "linear_num_key_heads", (
            f"is not divisible by --tensor-model-parallel-size {ranks}: ranks share whole heads"
        )
    yield from _not_built(config, "--linear-attention-freq", _BESIDE_STATES)
    yield from _pattern_problems(config)


def _pattern_problems(config: RLConfig) -> Iterator[Finding]:
    layers, stages = config.model.num_layers, config.stages
    if layers is None:
        return
    try:
        has_state = linear_layers(config.delta.linear_attention_freq, layers)
    except ValueError as error:
        yield "linear_attention_freq", f"{error}; use a number such as 4, or a list with a 0 or 1 for each layer"
        return
    if not any(has_state):
        yield "linear_attention_freq", "gives no layer a state; leave it out"
    if not stages.sizes(layers):
        return
    for stage in range(stages.count):
        if all(has_state[layer] for chunk in stages.layers_of(stage, layers) for layer in chunk):
            where = f"pipeline stage {stage} has" if stages.count > 1 else "the model has"
            yield "linear_attention_freq", f": {where} no layer with attention, which is not built; give it one"
            return


def rotation_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Report what YaRN lacks, and what it cannot be combined with."""
    rotation, model = config.rotation, config.model
    if rotation.rope_type != "yarn":
        for name in YARN:
            if getattr(rotation, name) != RotationOptions.__dataclass_fields__[name].default:
                yield name, "has no effect without --rope-type yarn; add it"
        return
    if rotation.beta_fast < rotation.beta_slow:
        yield "beta_fast", f"must be at least --beta-slow {rotation.beta_slow:g}"
    for name in ("use_rope_scaling", "rotary_seq_len_interpolation_factor"):
        if config.value(name):
            yield name, "and --rope-type yarn are two ways to scale positions; keep one of them"
    if model.rotary_base == 1:
        yield "rotary_base", "with --rope-type yarn: it has one frequency alone; use 10000 or such"
