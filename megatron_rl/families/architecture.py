"""The shape of a model in Megatron's terms, the kind of each layer, and the distribution of layers over ranks."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from megatron_rl.families.shape import DeltaRule, ExpertOptions, LatentAttention, LayerOptions, RotationOptions

MOST_LAYERS = 1000
MOST_EXPERTS = 100_000
"""Limits for a whole model: each tensor is listed by name, so more would exhaust memory before any check."""


@dataclass(frozen=True)
class LayerKind:
    """How a decoder layer differs from one of Llama, whose kind is `PLAIN`."""

    mixer: str = "heads"
    """Token mixer: a name of `BLOCKS`."""
    mlp: str = "dense"
    """MLP: a name of `BLOCKS`."""
    rotation: str = "main"
    """Rotation of queries and keys: a name of `Architecture.rotations`."""
    window: int | None = None
    """Sliding window: number of most recent tokens including the token itself; None: all."""
    scale: float | None = None
    """Factor of the attention scores; None: 1 / sqrt(head width)."""
    sinks: bool = False
    """Attention sinks: a learned logit per head in the softmax, with a zero value."""
    pre_norms: bool = True
    """Normalise the inputs of attention and MLP."""
    post_norms: bool = False
    """Normalise the outputs of attention and MLP before they are added to the residual stream."""
    norm_across_heads: bool = False
    """Normalise queries and keys over all heads together instead of per head."""


PLAIN = LayerKind()
YARN = (
    "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "correction_range_round_to_int",
)  # fmt: skip
"""Flags of YaRN, with --rope-type yarn."""


@dataclass(frozen=True, kw_only=True)
class Architecture(RotationOptions, ExpertOptions, LayerOptions, LatentAttention, DeltaRule):
    """A decoder with rotary positions. Fields are named like their flags; `kinds` derives each layer from them."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    """Rows of the embedding, without Megatron's padding."""
    max_position_embeddings: int
    rotary_base: int
    use_rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    norm_epsilon: float
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    num_experts: int | None = None
    """None: dense layers."""
    moe_ffn_hidden_size: int | None = None
    moe_router_topk: int = 2
    moe_router_pre_softmax: bool = False
    untie_embeddings_and_output_weights: bool
    init_method_std: float
    normalization: str = "RMSNorm"
    swiglu: bool = True
    add_bias_linear: bool = False
    position_embedding_type: ClassVar[str] = "rope"
    rotary_percent: float = 1.0

    @property
    def is_gated(self) -> bool:
        """True for gated MLPs: ``activation(gate) x up``."""
        return self.swiglu or self.geglu or self.quick_geglu

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer.

        Example: with 6 layers, --window-size 512 and --window-attn-skip-freq 3 all but the third and the sixth have a
        window of 512 tokens.
        """
        every, window, layers = self.window_attn_skip_freq, self.window_size, range(1, self.num_layers + 1)
        windowed = [window is not None and (every is None or number % every != 0) for number in layers]
        local = "main" if self.rotary_base_local is None else "local"
        sparse = expert_layers(self.moe_layer_freq, self.num_layers) if self.num_experts else [False] * self.num_layers
        recurrent = linear_layers(self.linear_attention_freq, self.num_layers)
        plain = LayerKind(
            mixer="latent" if self.multi_latent_attention else "gated" if self.attention_output_gate else "heads",
            scale=self.softmax_scale,
            sinks=self.softmax_type == "learnable",
            pre_norms=not self.post_norm,
            post_norms=self.sandwich_norm or self.post_norm,
            norm_across_heads=self.qk_layernorm_across_heads,
        )
        delta = LayerKind(mixer="delta", pre_norms=plain.pre_norms, post_norms=plain.post_norms)
        return tuple(
            replace(
                delta if has_state else plain,
                mlp="experts" if has_experts else "dense",
                **({"rotation": local, "window": window} if has_window else {}),
            )
            for has_window, has_experts, has_state in zip(windowed, sparse, recurrent, strict=True)
        )

    @property
    def rotations(self) -> dict[str, dict[str, Any]]:
        """Name -> arguments of megatron's `RotaryEmbedding`; under ``yarn`` those of `yarn_rotation`."""
        whole = self.qk_pos_emb_head_dim if self.multi_latent_attention else self.kv_channels
        width = {"kv_channels": whole, "rotary_percent": self.rotary_percent}
        main = width | {
            "rotary_base": self.rotary_base, "rope_scaling": self.use_rope_scaling,
            "rope_scaling_factor": self.rope_scaling_factor,
            "seq_len_interpolation_factor": self.rotary_seq_len_interpolation_factor,
        }  # fmt: skip
        if self.rope_type == "yarn":
            main["yarn"] = {name: getattr(self, name) for name in YARN}
        local = {} if self.rotary_base_local is None else {"local": width | {"rotary_base": self.rotary_base_local}}
        return {"main": main, **local}

    def settings(self) -> dict[str, Any]:
        """Return each flag's value by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


_REPEATED = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d{1,4}))?")
_WHOLE = re.compile(r"\((.+)\)(?:\*(\d{1,4}))?")


def expert_layers(pattern: str, num_layers: int) -> tuple[bool, ...]:
    """Parse Megatron's `--moe-layer-freq`: which layers have experts.

    Example: for 4 layers ``2`` means the first and the third, ``([0]*1+[1]*3)`` all but the first.

    Raises:
        ValueError: neither a number nor such a list, or a list of another length; the text follows the value.
    """
    text = pattern.replace(" ", "")
    if text.isdecimal() and 1 <= int(text) <= MOST_LAYERS:
        return tuple(index % int(text) == 0 for index in range(num_layers))
    whole = _WHOLE.fullmatch(text)
    inner, times = (whole[1], int(whole[2] or 1)) if whole else (text, 1)
    terms = [_REPEATED.fullmatch(term) for term in inner.split("+")]
    if not all(terms):
        raise ValueError("is neither a whole number above 0 nor a list such as ([0]*1+[1]*3)")
    length = times * sum(len(term[1].split(",")) * int(term[2] or 1) for term in terms)
    if length != num_layers:
        raise ValueError(f"lists {length} layers where --num-layers is {num_layers}")
    once = [number == "1" for term in terms for number in term[1].split(",") * int(term[2] or 1)]
    return tuple(once * times)


def layer_pattern(layers: Sequence[bool]) -> str:
    """Return the canonical `--moe-layer-freq` of ``layers``: see `expert_layers`."""
    runs = [(number, len([*run])) for number, run in itertools.groupby(map(int, layers))]
    return "1" if all(layers) else f"({'+'.join(f'[{number}]*{length}' for number, length in runs)})"


def linear_layers(pattern: str | None, num_layers: int) -> tuple[bool, ...]:
    """Parse Megatron's `--linear-attention-freq`: which layers have a recurrent state instead of attention.

    Example: for 4 layers ``4`` means all but the last, like ``([1]*3+[0]*1)``; None: no layer.

    Raises:
        ValueError: see `expert_layers`.
    """
    if pattern is None:
        return (False,) * num_layers
    if pattern.isdecimal() and 1 <= int(pattern) <= MOST_LAYERS:
        return tuple((index + 1) % int(pattern) != 0 for index in range(num_layers))
    return expert_layers(pattern, num_layers)


def linear_pattern(layers: Sequence[bool]) -> str | None:
    """Return `--linear-attention-freq` of ``layers``, as a number if possible: see `linear_layers`."""
    every = [*layers, False].index(False) + 1
    if not any(layers):
        return None
    return str(every) if linear_layers(str(every), len(layers)) == tuple(layers) else layer_pattern(layers)


def padded_vocabulary(vocab_size: int, divisible_by: int, tensor_size: int = 1) -> int:
    """Return the embedding's rows by Megatron's rule: a multiple of ``divisible_by * tensor_size``."""
    multiple = divisible_by * tensor_size
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True)
class Stages:
    """The layers of each pipeline stage.

    Example: 8 layers on two stages with two chunks each (virtual stages): 0 1 and 4 5, 2 3 and 6 7.
    """

    count: int = 1
    first: int | None = None
    """Layers of the first stage; None: as many as others."""
    last: int | None = None
    chunks: int = 1
    """Virtual pipeline chunks per stage."""

    def sizes(self, num_layers: int) -> list[int]:
        """Return the number of layers of each stage; empty if they cannot be divided like this.

        Example: 7 layers on 3 stages with 3 on the first are 3, 2 and 2.
        """
        ends = [size for size in (self.first, self.last) if size is not None]
        between = self.count - len(ends)
        sizes = [max(0, num_layers - sum(ends)) // max(between, 1)] * self.count
        if self.first is not None:
            sizes[0] = self.first
        if self.last is not None:
            sizes[-1] = self.last
        are_whole = all(size >= self.chunks and size % self.chunks == 0 for size in sizes)
        return sizes if are_whole and sum(sizes) == num_layers else []

    def layers_of(self, stage: int, num_layers: int) -> list[range]:
        """Return the layers of each chunk of ``stage``, counted over the whole model."""
        sizes = [size // self.chunks for size in self.sizes(num_layers)]
        starts = [chunk * sum(sizes) + sum(sizes[:stage]) for chunk in range(self.chunks)]
        return [range(start, start + sizes[stage]) for start in starts]


ONE_STAGE = Stages()


@dataclass(frozen=True)
class ExpertShare:
    """The experts of each layer on one rank.

    Example: of 4 experts on 2 expert-parallel ranks, `rank` 1 has experts 2 and 3.
    """

    ranks: int = 1
    """Expert-parallel ranks, with equal numbers of experts."""
    rank: int = 0
    tensor_size: int | None = None
    """Ranks that split each expert; None: as many as for other linears."""

    def of(self, num_experts: int) -> range:
        """Return this rank's experts, counted over the whole layer."""
        count = num_experts // self.ranks
        return range(self.rank * count, (self.rank + 1) * count)


ALL_EXPERTS = ExpertShare()
