"""The shape of the transformer and its vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_rl.config.flags import Finding, divisors, flag, flags_of, nearest_multiples
from megatron_rl.errors import Problem
from megatron_rl.families.architecture import MOST_EXPERTS, MOST_LAYERS
from megatron_rl.registry import PARSERS

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
    """The architecture, in Megatron's words."""

    hf_config: str | None = flag(None, path=True)
    """Directory with a Hugging Face config.json, or name on the hub: the model's shape, instead of the flags below. See
    --load-hf."""
    num_layers: int | None = flag(None, ge=1, le=MOST_LAYERS, common=True, needed=(_SHAPE, "28"))
    """Number of transformer layers."""
    hidden_size: int | None = flag(None, ge=1, le=1_000_000, common=True, needed=(_SHAPE, "1536"))
    """Width of the residual stream."""
    ffn_hidden_size: int | None = flag(None, ge=1, le=10_000_000, derived=_ffn_hidden_size, source="--hidden-size")
    """Width of the MLP. Without it 4 x hidden-size, or with --swiglu 8/3 x hidden-size in steps of 64."""
    num_attention_heads: int | None = flag(None, ge=1, le=65_536, common=True, needed=(_SHAPE, "12"))
    """Number of query heads."""
    group_query_attention: bool = flag(False)
    """Share key and value heads among query heads; --num-query-groups says how many there are."""
    num_query_groups: int | None = flag(
        None, ge=1, le=65_536,
        derived=lambda config, _: 1 if config.model.group_query_attention else config.model.num_attention_heads,
    )
    """Key and value heads. Without it 1 under --group-query-attention, else --num-attention-heads."""
    kv_channels: int | None = flag(
        None, ge=1, le=65_536, derived=_kv_channels, source="--hidden-size / --num-attention-heads"
    )
    """Width of one head. Without it hidden-size / num-attention-heads."""
    max_position_embeddings: int | None = flag(None, ge=1, derived=lambda config, _: config.training.seq_length)
    """Longest sequence the model may see. Without it --seq-length."""
    position_embedding_type: Literal["rope", "learned_absolute", "none"] = flag(
        "rope", only="the rollout engine rotates queries and keys"
    )
    """How positions are encoded; only rope is built (Megatron's default: learned_absolute)."""
    rotary_base: int = flag(10000, ge=1, le=10**12)
    """Base of the rotary frequencies."""
    rotary_percent: float = flag(1.0, gt=0, le=1)
    """Share of each head that is rotated."""
    use_rope_scaling: bool = flag(False)
    """Scale low rotary frequencies as Llama 3.1 does."""
    rope_scaling_factor: float = flag(8.0, ge=1, le=10_000)
    """By how much, with --use-rope-scaling: 8 in Llama 3.1, 32 in Llama 3.2."""
    normalization: Literal["RMSNorm", "LayerNorm"] = flag("RMSNorm")
    """Normalisation layer (Megatron's default: LayerNorm)."""
    norm_epsilon: float = flag(1e-5, gt=0, le=1)
    """Added to the variance in the normalisation."""
    swiglu: bool = flag(False)
    """Gated SiLU in the MLP instead of GELU."""
    add_bias_linear: bool = flag(True, off="--disable-bias-linear")
    """Biases of linear layers."""
    add_qkv_bias: bool = flag(False)
    """Give the query, key and value projection a bias, also under --disable-bias-linear."""
    qk_layernorm: bool = flag(False)
    """Normalise queries and keys per head."""
    num_experts: int | None = flag(None, ge=2, le=2048)
    """Routed experts in place of the MLP of every layer; without it layers are dense."""
    moe_ffn_hidden_size: int | None = flag(
        None, ge=1, le=10_000_000, source="--ffn-hidden-size",
        derived=lambda config, _: config.model.num_experts and config.model.ffn_hidden_size,
    )
    """Width of one expert. Without it --ffn-hidden-size."""
    moe_router_topk: int = flag(2, ge=1)
    """Experts that each token is sent to."""
    moe_router_pre_softmax: bool = flag(False)
    """Weight experts by their share among all of them, not among those chosen."""
    moe_grouped_gemm: bool | None = flag(
        None, derived=lambda config, _: config.model.num_experts is not None and not [*_grouped_problems(config)]
    )
    """A layer's experts are one product, not one each. Without it they are where widths are whole 16 bytes."""
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss"] = flag("none")
    """Loss that keeps experts equally busy, within each micro-batch or sequence (Megatron's default: aux_loss)."""
    moe_aux_loss_coeff: float = flag(0.0, ge=0, le=1000)
    """Weight of that loss beside the policy's."""
    moe_z_loss_coeff: float | None = flag(None, gt=0, le=1000)
    """Weight of the mean squared log-sum-exp of the router's logits, which keeps them small."""
    untie_embeddings_and_output_weights: bool = flag(False)
    """Give the output head its own weight instead of the embedding's."""
    init_method_std: float = flag(0.02, gt=0, le=100)
    """Standard deviation of freshly initialised weights."""
    embedding_init_method_std: float | None = flag(
        None, gt=0, le=100, derived=lambda config, _: config.model.init_method_std
    )
    """The same for the embedding. Without it --init-method-std."""
    attention_dropout: float = flag(0.0, ge=0, lt=1, only="the attention kernels have none")
    """Dropout of attention weights; must be 0 (Megatron's default: 0.1)."""
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
    """The tokenizer and the size of the vocabulary."""

    tokenizer_type: Literal["HuggingFaceTokenizer"] = flag("HuggingFaceTokenizer")
    """Kind of tokenizer."""
    tokenizer_model: str | None = flag(None, path=True, common=True, needed=("prompts are text", "Qwen/Qwen2.5-1.5B"))
    """Tokenizer: a directory, or a name on the Hugging Face hub."""
    chat_template: str | None = flag(None, path=True)
    """File with a Jinja chat template for prompts that are chats. Without it the tokenizer's own."""
    chat_template_kwargs: str | None = flag(None)
    """Variables for the chat template as a JSON object, for example '{"enable_thinking": false}'."""
    system_prompt: str | None = flag(None)
    """System message of chats that have none of their own."""
    rl_tool_call_parser: str = flag("auto", names_of=PARSERS)
    """What reads the model's calls of tools: auto, which goes by the words of the chat template, a name, or
    file.py:PARSER."""
    vocab_size: int | None = flag(None, ge=1, le=100_000_000)
    """Rows of the embedding, before padding, where the model has more than the tokenizer has tokens."""
    make_vocab_size_divisible_by: int = flag(128, ge=1, le=1_000_000)
    """Pad the vocabulary to a multiple of this times the tensor-parallel size."""


def shape_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Heads and widths that do not fit each other or the tensor-parallel size."""
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
    if model.hidden_dropout > 0 and config.training.perform_rl_step:
        yield "hidden_dropout", (
            "with --perform-rl-step: rollouts have no dropout, so log-probs would differ; use --hidden-dropout 0"
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


def expert_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Settings that experts need, and that they cannot be combined with."""
    model, parts = config.model, config.parallel.tensor_model_parallel_size
    if model.num_experts is None:
        for name in (
            "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax", "moe_grouped_gemm",
            "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff",
        ):  # fmt: skip
            if name in config.typed:
                given = f"--{name.replace('_', '-')}"
                what = f"{given} without --num-experts: dense layers have no router; add it, or leave out {given}"
                yield Problem(given, what)
        return
    yield from _router_problems(model)
    if model.moe_grouped_gemm:
        yield from _grouped_problems(config)
    if model.num_experts * (model.num_layers or 0) > MOST_EXPERTS:
        yield "num_experts", (
            f"in each of {model.num_layers} layers are more than the {MOST_EXPERTS:,} experts that a model may have"
        )
    if model.add_bias_linear:
        yield "num_experts", "with biases of linear layers is not built: add --disable-bias-linear"
    if parts > 1 and not config.parallel.sequence_parallel:
        yield "num_experts", (
            f"with --tensor-model-parallel-size {parts} needs --sequence-parallel in training; add it"
        )
    if "mlp" in (config.kernels.recompute_modules or ()):
        yield "recompute_modules", "with --num-experts: there is no dense MLP to recompute; use core_attn, or full"


def _router_problems(model: ModelConfig) -> Iterator[Finding]:
    kind, weight, most = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff, model.num_experts
    if model.moe_router_topk > most:
        yield "moe_router_topk", f"is more than --num-experts {most}; use at most {most}"
    if model.moe_router_topk == 1 and not model.moe_router_pre_softmax:
        yield "moe_router_topk", (
            "gives the chosen expert the weight 1, so the router would learn nothing; add --moe-router-pre-softmax"
        )
    if weight and kind == "none":
        yield "moe_aux_loss_coeff", "has no loss to weigh; add --moe-router-load-balancing-type seq_aux_loss or such"
    if kind != "none" and not weight:
        yield "moe_router_load_balancing_type", "has no effect without a weight; add --moe-aux-loss-coeff 0.001"


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


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """What layers of some families have beyond Llama's, in Megatron's words; a config.json fills it in."""

    window_size: int | None = flag(None, ge=1)
    """Sliding-window attention: each token attends to this many tokens, itself included, for example 512."""
    window_attn_skip_freq: int | None = flag(None, ge=2)
    """Every this many layers one attends to all tokens in spite of --window-size, for example 6."""
    softmax_scale: float | None = flag(None, gt=0, le=100)
    """Factor of the attention scores, for example 0.0625. Without it 1 / sqrt(--kv-channels)."""
    rotary_base_local: int | None = flag(None, ge=1, le=10**12)
    """Base of the rotary frequencies in layers with a window, for example 10000. Without it --rotary-base."""
    rotary_seq_len_interpolation_factor: float | None = flag(None, ge=1, le=10_000)
    """Divide positions by this factor before they are turned into rotary angles, for example 8. Layers with a window
    and --rotary-base-local keep theirs."""
    geglu: bool = flag(False)
    """Gated GELU (its tanh approximation) in the MLP."""
    apply_layernorm_1p: bool = flag(False)
    """Norms store their weight less 1."""
    sandwich_norm: bool = flag(False)
    """Normalise the outputs of attention and MLP, too, before they are added to the residual stream."""
    scale_embedding: bool = flag(False)
    """Multiply embeddings by sqrt(--hidden-size)."""


def layer_problems(config: RLConfig, _: int) -> Iterator[Finding]:
    """Which of these need each other, and what cannot be combined with them."""
    layers, model = config.layers, config.model
    if layers.geglu and model.swiglu:
        yield "geglu", "and --swiglu are two activations of one MLP; keep one of them"
    for name in ("window_attn_skip_freq", "rotary_base_local"):
        if getattr(layers, name) is not None and layers.window_size is None:
            yield name, "has no layers to tell apart without --window-size; add it"
    used = [each.spelling for each in flags_of(LayerConfig) if getattr(layers, each.name) != each.default]
    if not used:
        return
    named = f"cannot be combined with {', '.join(used)}"
    if config.kernels.transformer_impl != "local":
        yield "transformer_impl", f"{named}: its fused layers compute Llama's; use --transformer-impl local"
    if config.rollout.rl_inference_engine != "rollout":
        yield "rl_inference_engine", f"{named}: megatron-core's engine computes Llama's layers; use rollout"
    if model.normalization != "RMSNorm":
        yield "normalization", f"{named}; use RMSNorm"
    if model.num_experts is not None:
        yield "num_experts", f"{named}: not built for experts"
    if model.add_bias_linear:
        yield "add_bias_linear", f"{named}: add --disable-bias-linear"
