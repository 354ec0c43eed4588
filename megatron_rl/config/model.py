"""The shape of the transformer and its vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_rl.config.flags import Finding, divisors, flag, flags_of, nearest_multiples
from megatron_rl.families.architecture import MOST_LAYERS
from megatron_rl.families.shape import LayerOptions
from megatron_rl.registry import PARSERS, REASONING

if TYPE_CHECKING:
    from megatron_rl.config.rl_config import RLConfig

_SHAPE = "the model's shape has no default"


def _ffn_hidden_size(config: RLConfig, _: int) -> int | None:
    """Follow Megatron: a gated MLP has a third matrix, so 2/3 of the width has as many parameters."""
    hidden = config.model.hidden_size
    if hidden is None:
        return None
    return max(64, int(4 * hidden * 2 / 3 / 64) * 64) if config.model.swiglu else 4 * hidden


def _kv_channels(config: RLConfig, _: int) -> int | None:
    hidden, heads = config.model.hidden_size, config.model.num_attention_heads
    return hidden // heads if hidden and heads and hidden % heads == 0 else None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model architecture, with Megatron's flag names."""

    hf_config: str | None = flag(None, path=True)
    """Take the model's shape, not its weights, from a Hugging Face directory with config.json or a name on the hub. See
    --load-hf."""
    num_layers: int | None = flag(None, ge=1, le=MOST_LAYERS, needed=(_SHAPE, "28"))
    """Number of transformer layers."""
    hidden_size: int | None = flag(None, ge=1, le=1_000_000, needed=(_SHAPE, "1536"))
    """Width of the residual stream."""
    ffn_hidden_size: int | None = flag(None, ge=1, le=10_000_000, derived=_ffn_hidden_size, source="--hidden-size")
    """Width of the MLP. Default: 4 x hidden-size, or with --swiglu 8/3 x hidden-size, rounded to a multiple of 64."""
    num_attention_heads: int | None = flag(None, ge=1, le=65_536, needed=(_SHAPE, "12"))
    """Number of query heads."""
    group_query_attention: bool = flag(False)
    """Use grouped-query attention, with --num-query-groups key and value heads."""
    num_query_groups: int | None = flag(
        None, ge=1, le=65_536,
        derived=lambda config, _: 1 if config.model.group_query_attention else config.model.num_attention_heads,
    )
    """Number of key and value heads. Default: 1 with --group-query-attention, else --num-attention-heads."""
    kv_channels: int | None = flag(
        None, ge=1, le=65_536, derived=_kv_channels, source="--hidden-size / --num-attention-heads"
    )
    """Width of one attention head. Default: hidden-size / num-attention-heads."""
    max_position_embeddings: int | None = flag(None, ge=1, derived=lambda config, _: config.training.seq_length)
    """Longest sequence that the model accepts, in tokens. Default: --seq-length."""
    rotary_base: int = flag(10000, ge=1, le=10**12)
    """RoPE base frequency (theta), e.g. 1000000 for Qwen2.5."""
    rotary_percent: float = flag(1.0, gt=0, le=1)
    """Fraction of each head that RoPE rotates."""
    use_rope_scaling: bool = flag(False)
    """Scale RoPE frequencies as Llama 3.1 does."""
    rope_scaling_factor: float = flag(8.0, ge=1, le=10_000)
    """Factor of --use-rope-scaling: 8 for Llama 3.1, 32 for Llama 3.2."""
    normalization: Literal["RMSNorm", "LayerNorm"] = flag("RMSNorm")
    """Normalization layer (Megatron's default: LayerNorm)."""
    norm_epsilon: float = flag(1e-5, gt=0, le=1)
    """Epsilon of the normalization layers."""
    swiglu: bool = flag(False)
    """Use SwiGLU instead of GELU in the MLP."""
    add_bias_linear: bool = flag(True, off="--disable-bias-linear")
    """Biases of linear layers."""
    add_qkv_bias: bool = flag(False)
    """Give the QKV projection a bias, even with --disable-bias-linear (Qwen2.5)."""
    qk_layernorm: bool = flag(False)
    """Normalize queries and keys per head (Qwen3)."""
    num_experts: int | None = flag(None, ge=2, le=2048)
    """Number of routed experts per MoE layer, e.g. 128. Default: dense layers."""
    moe_ffn_hidden_size: int | None = flag(
        None, ge=1, le=10_000_000, source="--ffn-hidden-size",
        derived=lambda config, _: config.model.num_experts and config.model.ffn_hidden_size,
    )
    """Width of one expert. Default: --ffn-hidden-size."""
    moe_router_topk: int = flag(2, ge=1)
    """Number of experts that each token is routed to."""
    moe_router_pre_softmax: bool = flag(False)
    """Apply the softmax over all experts before top-k, not over the chosen ones after it."""
    moe_grouped_gemm: bool | None = flag(
        None, derived=lambda config, _: config.model.num_experts is not None and not [*_grouped_problems(config)]
    )
    """Compute all experts of a layer in one grouped GEMM. Default: on where the widths are multiples of 16 bytes."""
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss"] = flag("none")
    """Load-balancing loss, computed per micro-batch or per sequence (Megatron's default: aux_loss)."""
    moe_aux_loss_coeff: float = flag(0.0, ge=0, le=1000)
    """Coefficient of the load-balancing loss, e.g. 0.001."""
    moe_z_loss_coeff: float | None = flag(None, gt=0, le=1000)
    """Coefficient of the router z-loss, e.g. 0.001. It keeps router logits small."""
    untie_embeddings_and_output_weights: bool = flag(False)
    """Give the output layer its own weight instead of sharing the embedding's."""
    init_method_std: float = flag(0.02, gt=0, le=100)
    """Standard deviation of the weight initialization."""
    embedding_init_method_std: float | None = flag(
        None, gt=0, le=100, derived=lambda config, _: config.model.init_method_std
    )
    """Standard deviation of the embedding's initialization. Default: --init-method-std."""
    hidden_dropout: float = flag(0.0, ge=0, lt=1)
    """Dropout of hidden states; must be 0 in RL (Megatron's default: 0.1)."""

    @property
    def is_complete(self) -> bool:
        """Every width and count is known, typed or derived."""
        return None not in (
            self.num_layers, self.hidden_size, self.ffn_hidden_size, self.num_attention_heads, self.num_query_groups,
            self.kv_channels,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Tokenizer, chat template and vocabulary size."""

    tokenizer_model: str | None = flag(None, path=True, common=True, needed=("prompts are text", "Qwen/Qwen2.5-1.5B"))
    """Tokenizer: a directory or a name on the Hugging Face hub."""
    chat_template: str | None = flag(None, path=True)
    """File with a Jinja chat template. Default: the tokenizer's own."""
    chat_template_kwargs: str | None = flag(None)
    """Variables for the chat template as a JSON object, e.g. '{"enable_thinking": false}'."""
    system_prompt: str | None = flag(None)
    """System message for chats that have none."""
    rl_tool_call_parser: str = flag("auto", names_of=PARSERS)
    """Parser of the model's tool calls: auto (recognized from the chat template), a name, or file.py:PARSER."""
    rl_reasoning_parser: str = flag("none", names_of=REASONING)
    """Parser of thoughts, which the endpoint returns as reasoning_content: none, a name, or file.py:PARSER."""
    vocab_size: int | None = flag(None, ge=1, le=100_000_000)
    """Rows of the embedding before padding, if the model has more than the tokenizer has tokens."""
    make_vocab_size_divisible_by: int = flag(128, ge=1, le=1_000_000)
    """Pad the vocabulary to a multiple of this times the tensor-parallel size."""


def shape_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Report heads and widths that do not fit each other or the tensor-parallel size."""
    model, parts = config.model, config.parallel.tensor_model_parallel_size
    heads, groups, width = model.num_attention_heads, model.num_query_groups, model.ffn_hidden_size
    not_divisible = f"is not divisible by tensor-parallel size {parts}: each rank holds"
    if heads is not None and heads % parts:
        yield "num_attention_heads", f"{not_divisible} whole heads; use --tensor-model-parallel-size {divisors(heads)}"
    if heads is not None and model.hidden_size and model.kv_channels is None:
        advice = f"use {nearest_multiples(model.hidden_size, heads)}, or give --kv-channels"
        yield "hidden_size", f"is not divisible by --num-attention-heads {heads}: heads share it evenly; {advice}"
    if heads is not None and groups is not None:
        yield from _group_problems(config, heads, groups)
    if width is not None and width % parts:
        yield "ffn_hidden_size", f"{not_divisible} an equal share; use {nearest_multiples(width, parts)}"
    width, cut = model.moe_ffn_hidden_size, config.parallel.expert_tensor_parallel_size
    if width is not None and width % cut:
        text = f"is not divisible by expert-tensor-parallel size {cut}: each rank holds an equal share"
        yield "moe_ffn_hidden_size", f"{text}; use {nearest_multiples(width, cut)}"
    rotated = int((model.kv_channels or 2) * model.rotary_percent)
    if model.kv_channels is not None and (rotated < 2 or rotated % 2):  # rotary positions turn pairs of numbers
        share = f"at --rotary-percent {model.rotary_percent:g} " if model.rotary_percent < 1 else ""
        yield "kv_channels", f"{share}gives {rotated} numbers of a head to rotate, in pairs; use an even number"
    if model.moe_grouped_gemm and model.num_experts is not None:
        yield from _grouped_problems(config)
    if model.hidden_dropout > 0 and config.training.perform_rl_step:
        yield "hidden_dropout", (
            "with --perform-rl-step: rollouts have no dropout, so log-probs would differ; use --hidden-dropout 0"
        )


def _grouped_problems(config: RLConfig) -> Iterator[Finding]:
    model, parallel, numbers = config.model, config.parallel, 8 if config.precision.bf16 else 4
    cut = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    for name, multiple in (("hidden_size", numbers), ("moe_ffn_hidden_size", cut * numbers)):
        width = getattr(model, name)
        if width is not None and width % multiple:
            yield name, (
                "with --moe-grouped-gemm: torch's grouped products take rows of whole 16 bytes; use "
                f"{nearest_multiples(width, multiple)}, or --no-moe-grouped-gemm"
            )


def _group_problems(config: RLConfig, heads: int, groups: int) -> Iterator[Finding]:
    parts = config.parallel.tensor_model_parallel_size
    if groups != heads and not config.model.group_query_attention:
        yield "num_query_groups", (
            f"without --group-query-attention: Megatron would use {heads}; add --group-query-attention, or leave it out"
        )
    if heads % groups:
        text = f"does not divide --num-attention-heads {heads}: groups share the query heads evenly"
        yield "num_query_groups", f"{text}; use {divisors(heads)}"
    if groups % parts and parts % groups:
        yield "num_query_groups", (
            f"does not fit tensor-parallel size {parts}: one must divide the other; use "
            f"--tensor-model-parallel-size {divisors(groups)}, or a multiple of {groups}"
        )


_OF_GPT_OSS = {
    "window_size", "window_attn_skip_freq", "softmax_type", "quick_geglu", "activation_func_clamp_value",
    "glu_linear_offset",
}  # fmt: skip
"""What is built together with experts and with biases, too."""


def layer_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Report which of these need each other, and what cannot be combined with them."""
    layers, model = config.layers, config.model
    gates = [*(name for name in ("geglu", "quick_geglu") if getattr(layers, name)), *["swiglu"] * model.swiglu]
    if len(gates) > 1:
        yield gates[0], f"and --{gates[1].replace('_', '-')} are two activations of one MLP; keep one of them"
    for name in ("window_attn_skip_freq", "rotary_base_local"):
        if getattr(layers, name) is not None and layers.window_size is None:
            yield name, "has no layers to tell apart without --window-size; add it"
    used = {each.name: each.spelling for each in flags_of(LayerOptions) if getattr(layers, each.name) != each.default}
    yield from _norm_problems(config)
    if not used:
        return
    named = f"cannot be combined with {', '.join(used.values())}"
    if config.kernels.transformer_impl != "local":
        yield "transformer_impl", f"{named}: its fused layers compute Llama's; use --transformer-impl local"
    if model.normalization != "RMSNorm":
        yield "normalization", f"{named}; use RMSNorm"
    built = _OF_GPT_OSS | ({"softmax_scale"} if config.latent.multi_latent_attention else set())
    built |= {"apply_layernorm_1p"} if config.delta.linear_attention_freq is not None else set()
    yield from _beside_experts_and_biases(model, used, gates, built)


def _beside_experts_and_biases(
    model: ModelConfig, used: Mapping[str, str], gates: Sequence[str], built: Set[str]
) -> Iterator[Finding]:
    others = [spelling for name, spelling in used.items() if name not in built]
    named = f"cannot be combined with {', '.join(others)}"
    if others and model.num_experts is not None:
        yield "num_experts", f"{named}: not built for experts"
    if others and model.add_bias_linear:
        yield "add_bias_linear", f"{named}: add --disable-bias-linear"
    for name in ("activation_func_clamp_value", "glu_linear_offset"):
        if name in used and (model.num_experts is None or not gates):
            yield name, "is of the gates of experts, and the model has none; leave it out"


def _norm_problems(config: RLConfig) -> Iterator[Finding]:
    groups, parts = config.model.num_query_groups, config.parallel.tensor_model_parallel_size
    if config.layers.post_norm and config.layers.sandwich_norm:
        yield "post_norm", "and --sandwich-norm are two places of norms; keep one of them"
    if not config.layers.qk_layernorm_across_heads:
        return
    if not config.model.qk_layernorm:
        yield "qk_layernorm_across_heads", "says how --qk-layernorm normalizes; add it"
    if groups is not None and groups % parts:
        yield "qk_layernorm_across_heads", (
            f"with fewer --num-query-groups ({groups}) than --tensor-model-parallel-size {parts}: ranks would share a "
            f"key; use --tensor-model-parallel-size {divisors(groups)}"
        )
