"""The shape of a model in Megatron's words, what kind each of its layers is, and how ranks share the layers."""

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
"""Of a model, in all its layers: each tensor is listed by name, so more would fill the memory before any check."""


@dataclass(frozen=True)
class LayerKind:
    """The parts of one decoder layer that differ from a layer of Llama's, whose kind is `PLAIN`."""

    mixer: str = "heads"
    """What exchanges between tokens: a name of `BLOCKS`."""
    mlp: str = "dense"
    """What computes each token by itself: a name of `BLOCKS`."""
    rotation: str = "main"
    """Which of the model's rotations turns queries and keys: see `Architecture.rotations`."""
    window: int | None = None
    """The most recent tokens that a token attends to, itself included; None: all."""
    scale: float | None = None
    """Factor of the attention scores; None: 1 / sqrt(width of a head)."""
    sinks: bool = False
    """Each head has an attention sink: a learned logit in the softmax over its scores, which attends to nothing."""
    pre_norms: bool = True
    """Attention's and the MLP's inputs are normalised."""
    post_norms: bool = False
    """Attention's and the MLP's outputs are normalised before they are added to the residual stream."""
    norm_across_heads: bool = False
    """Queries, and keys, are normalised over all heads together, not head by head."""


PLAIN = LayerKind()
YARN = (
    "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "correction_range_round_to_int",
)  # fmt: skip
"""The flags of YaRN, with --rope-type yarn."""


@dataclass(frozen=True, kw_only=True)
class Architecture(RotationOptions, ExpertOptions, LayerOptions, LatentAttention, DeltaRule):
    """A decoder with rotary positions. Fields are named like their flags; `kinds` says what they make of each layer."""

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
        """The MLP has a gate: ``activation(gate) x up``."""
        return self.swiglu or self.geglu or self.quick_geglu

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer.

        Example: 6 layers with --window-size 512 and --window-attn-skip-freq 3 attend to 512 tokens, but the third and
        the sixth to all.
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
        """Name -> arguments of megatron's `RotaryEmbedding`, and under ``yarn`` those of `yarn_rotation`."""
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
        """Return each flag's value by its name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


_REPEATED = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d{1,4}))?")
_WHOLE = re.compile(r"\((.+)\)(?:\*(\d{1,4}))?")


def expert_layers(pattern: str, num_layers: int) -> tuple[bool, ...]:
    """Read Megatron's `--moe-layer-freq`: which layers have experts.

    Example: of 4 layers ``2`` are the first and the third, ``([0]*1+[1]*3)`` all but the first.

    Raises:
        ValueError: it is neither a number nor such a list, or a list of another length; in words that follow it.
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
    """Write `--moe-layer-freq`, always alike for the same layers: see `expert_layers`."""
    runs = [(number, len([*run])) for number, run in itertools.groupby(map(int, layers))]
    return "1" if all(layers) else f"({'+'.join(f'[{number}]*{length}' for number, length in runs)})"


def linear_layers(pattern: str | None, num_layers: int) -> tuple[bool, ...]:
    """Read Megatron's `--linear-attention-freq`: which layers have a recurrent state in place of attention.

    Example: of 4 layers ``4`` are all but the last, as are ``([1]*3+[0]*1)``; None: no layer.

    Raises:
        ValueError: see `expert_layers`.
    """
    if pattern is None:
        return (False,) * num_layers
    if pattern.isdecimal() and 1 <= int(pattern) <= MOST_LAYERS:
        return tuple((index + 1) % int(pattern) != 0 for index in range(num_layers))
    return expert_layers(pattern, num_layers)


def linear_pattern(layers: Sequence[bool]) -> str | None:
    """Write `--linear-attention-freq`: a number where one fits, see `linear_layers`."""
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

    8 layers on two stages with two chunks each (Megatron's virtual stages): 0 1 and 4 5, 2 3 and 6 7.
    """

    count: int = 1
    first: int | None = None
    """Layers of the first stage; None: as many as others."""
    last: int | None = None
    chunks: int = 1
    """Parts of a stage's layers, with those of the other stages in between."""

    def sizes(self, num_layers: int) -> list[int]:
        """Return the number of layers of each stage; nothing where they cannot be shared like this.

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
    """The experts of each layer that one rank has.

    Of 4 experts on 2 expert-parallel ranks the second, `rank` 1, has experts 2 and 3.
    """

    ranks: int = 1
    """Expert-parallel ranks: each has equally many experts."""
    rank: int = 0
    tensor_size: int | None = None
    """Ranks that cut each of their experts; None: as many as cut the other linears."""

    def of(self, num_experts: int) -> range:
        """Return experts of this rank, counted over the whole layer."""
        count = num_experts // self.ranks
        return range(self.rank * count, (self.rank + 1) * count)


ALL_EXPERTS = ExpertShare()
