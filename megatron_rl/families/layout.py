"""The structure of a model, known once: parameters, linears and KV cache of one rank, by arithmetic alone.

`GPTModel` as built is held to it by `tests/unit/families/test_layout.py`; see docs/architecture.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_rl.families.architecture import ALL_EXPERTS, ONE_STAGE, Architecture, ExpertShare, LayerKind, Stages

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
Head = Literal["vocabulary", "value"]
"""Logits, or the one number of a critic."""


def own_name(name: str) -> str:
    """Transformer Engine's fused layers hold the norm before them; without it, norms have names of their own."""
    name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    return name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


@dataclass(frozen=True)
class Parameter:
    """A parameter of the whole model, and how tensor-parallel ranks share it."""

    name: str
    """As megatron has it, layers and experts counted over all ranks: ``decoder.layers.3.mlp.linear_fc1.weight``."""
    shape: tuple[int, ...]
    """Of all ranks together, padding included."""
    cut: Literal["rows", "columns"] | None = None
    """None: every rank has all of it."""
    ranks: int = 1
    blocks: int = 1
    """The rows are so many blocks of one height, each cut by itself: 2 for gate and up projection."""

    @property
    def is_over_the_vocabulary(self) -> bool:
        """Its rows are tokens, and padding."""
        return self.name in (EMBEDDING, HEAD) and not self.is_value_head

    @property
    def is_value_head(self) -> bool:
        """Of a critic; every tensor-parallel rank has all of it, where logits are always cut."""
        return self.name == HEAD and self.cut is None

    @property
    def is_of_an_expert(self) -> bool:
        """`ranks` are the expert-tensor-parallel ones."""
        return ".experts." in self.name

    @property
    def local_shape(self) -> tuple[int, ...]:
        """What one rank holds."""
        if self.cut is None:
            return self.shape
        height, *width = self.shape
        return (height // self.ranks, *width) if self.cut == "rows" else (height, width[0] // self.ranks)

    @property
    def size(self) -> int:
        """Numbers on one rank."""
        return math.prod(self.local_shape)


@dataclass(frozen=True)
class Linear:
    """A parallel linear layer: y = x W^T + b."""

    name: str
    """``layers.0.mlp.linear_fc1``, layers counted over the whole model."""
    kind: Literal["column", "row"]
    """Which dimension tensor-parallel ranks share: the outputs (column), or the inputs, their products added (row)."""
    outputs: int
    """Of all ranks together, as ``inputs``."""
    inputs: int
    ranks: int = 1
    blocks: int = 1
    """See `Parameter`."""
    has_bias: bool = False

    @property
    def rows(self) -> int:
        """Outputs of one rank."""
        return self.outputs // self.ranks if self.kind == "column" else self.outputs

    @property
    def columns(self) -> int:
        """Inputs of one rank."""
        return self.inputs // self.ranks if self.kind == "row" else self.inputs

    @property
    def parameters(self) -> Iterator[Parameter]:
        """Weight, and bias if it has one."""
        name, cut = f"decoder.{self.name}", "rows" if self.kind == "column" else "columns"
        yield Parameter(f"{name}.weight", (self.outputs, self.inputs), cut, self.ranks, self.blocks)
        if self.has_bias:
            cut = "rows" if self.kind == "column" else None
            yield Parameter(f"{name}.bias", (self.outputs,), cut, self.ranks, self.blocks)


@dataclass(frozen=True)
class LayerCache:
    """What a layer of full attention keeps on one rank: the key and the value of each token, head by head.

    A layer of another kind (a window, a latent) answers `numbers` in its own way.
    """

    heads: int
    key_width: int
    value_width: int

    def numbers(self, tokens: int) -> int:
        """Kept of a sequence of ``tokens``. Example: 2 heads of 8 and 8 keep 96 numbers of 3 tokens."""
        return tokens * self.heads * (self.key_width + self.value_width)


@dataclass(frozen=True)
class Layer:
    """A decoder layer."""

    index: int
    """From 0, over the whole model."""
    parts: tuple[Parameter | Linear, ...]
    """In megatron's order."""
    cache: LayerCache
    kind: LayerKind

    @property
    def linears(self) -> list[Linear]:
        """Attention's and the MLP's, or every expert's; the router is none of them."""
        return [part for part in self.parts if isinstance(part, Linear)]


@dataclass(frozen=True)
class ModelLayout:
    """What one rank holds of a model. All ranks of a stage hold as much."""

    architecture: Architecture
    padded_vocab_size: int
    """Rows of embedding and head over all tensor-parallel ranks."""
    tensor_size: int
    layers: tuple[Layer, ...]
    """This stage's, chunk by chunk."""
    most_layers: int
    """Of the stage that has the most."""
    before: tuple[Parameter, ...]
    """The embedding, on the first stage."""
    after: tuple[Parameter, ...]
    """Final norm and head, on the last stage; a tied head is there, under the embedding's name, where that is not."""
    is_first: bool
    is_last: bool
    head: Head = "vocabulary"

    @classmethod
    def of(
        cls,
        model: Architecture,
        tensor_size: int = 1,
        padded_vocab_size: int | None = None,
        stage: int = 0,
        stages: Stages = ONE_STAGE,
        experts: ExpertShare = ALL_EXPERTS,
        head: Head = "vocabulary",
    ) -> ModelLayout:
        """Of a rank of pipeline stage ``stage``, counted from 0."""
        is_first, is_last = stage == 0, stage == stages.count - 1
        rows = padded_vocab_size or model.vocab_size
        table, chunks = (rows, model.hidden_size), stages.layers_of(stage, model.num_layers)
        kinds = model.kinds
        after = list(_norm("decoder.final_layernorm", model.hidden_size, model))
        is_untied = model.untie_embeddings_and_output_weights
        if head == "value":
            after.append(Parameter(HEAD, (1, model.hidden_size)))
        elif is_untied or not is_first:
            after.append(Parameter(HEAD if is_untied else EMBEDDING, table, "rows", tensor_size))
        return cls(
            architecture=model,
            padded_vocab_size=rows,
            tensor_size=tensor_size,
            layers=tuple(_layer(i, kinds[i], model, tensor_size, experts) for chunk in chunks for i in chunk),
            most_layers=max(stages.sizes(model.num_layers)),
            before=(Parameter(EMBEDDING, table, "rows", tensor_size),) if is_first else (),
            after=tuple(after) if is_last else (),
            is_first=is_first,
            is_last=is_last,
            head=head,
        )

    @property
    def is_tied(self) -> bool:
        """The head's weight is the embedding's."""
        return self.head == "vocabulary" and not self.architecture.untie_embeddings_and_output_weights

    @property
    def parameters(self) -> Iterator[Parameter]:
        """In the order of ``named_parameters`` of this rank's chunks."""
        yield from self.before
        for layer in self.layers:
            for part in layer.parts:
                yield from part.parameters if isinstance(part, Linear) else (part,)
        yield from self.after

    @property
    def linears(self) -> list[Linear]:
        """Of all decoder layers; embedding and head are none of them."""
        return [linear for layer in self.layers for linear in layer.linears]

    @property
    def expert_id_bytes(self) -> int:
        """One, with 256 experts or more two: the largest number is no expert's."""
        return 1 if (self.architecture.num_experts or 0) < 256 else 2

    @property
    def routing_bytes(self) -> int:
        """Of the experts of a token (`--rl-router-replay`), as `slot_numbers` on the stage that has the most layers."""
        return self.most_layers * self.architecture.moe_router_topk * self.expert_id_bytes

    def cache_numbers(self, tokens: int) -> int:
        """What all layers keep of a sequence of ``tokens``, on one rank."""
        return sum(layer.cache.numbers(tokens) for layer in self.layers)

    def slot_numbers(self, tokens: int) -> int:
        """The same on the stage that has the most layers: all stages give a sequence as much room.

        So their caches hold as many sequences, and their schedulers decide alike.
        """
        return self.cache_numbers(tokens) // len(self.layers) * self.most_layers


def _layer(index: int, kind: LayerKind, model: Architecture, ranks: int, experts: ExpertShare) -> Layer:
    name, hidden = f"layers.{index}", model.hidden_size
    query, key = model.num_attention_heads * model.kv_channels, model.num_query_groups * model.kv_channels
    attention, bias = f"{name}.self_attention", model.add_bias_linear
    qkv_bias = bias or model.add_qkv_bias
    parts = [
        *_norm(f"decoder.{name}.input_layernorm", hidden, model),
        Linear(f"{attention}.linear_proj", "row", hidden, query, ranks, has_bias=bias),
        Linear(f"{attention}.linear_qkv", "column", query + 2 * key, hidden, ranks, has_bias=qkv_bias),
    ]
    if model.qk_layernorm:
        parts += _norm(f"decoder.{attention}.q_layernorm", model.kv_channels, model)
        parts += _norm(f"decoder.{attention}.k_layernorm", model.kv_channels, model)
    if kind.post_norms:
        parts += _norm(f"decoder.{attention}.post_layernorm", hidden, model)
    parts += _norm(f"decoder.{name}.pre_mlp_layernorm", hidden, model)
    parts += _mlp(f"{name}.mlp", model, ranks, experts)
    if kind.post_norms:
        parts += _norm(f"decoder.{name}.mlp.post_layernorm", hidden, model)
    # With fewer groups than ranks a rank stores part of one, which megatron gathers, and caches all of it.
    heads = max(1, model.num_query_groups // ranks)
    return Layer(index, tuple(parts), LayerCache(heads, model.kv_channels, model.kv_channels), kind)


def _mlp(name: str, model: Architecture, ranks: int, experts: ExpertShare) -> Iterator[Parameter | Linear]:
    names, width = [name], model.ffn_hidden_size
    if model.num_experts is not None:
        yield Parameter(f"decoder.{name}.router.weight", (model.num_experts, model.hidden_size))
        names = [f"{name}.experts.local_experts.{expert}" for expert in experts.of(model.num_experts)]
        width, ranks = model.moe_ffn_hidden_size, experts.tensor_size or ranks
    halves = 2 if model.is_gated else 1
    for mlp in names:
        yield Linear(
            f"{mlp}.linear_fc1", "column", halves * width, model.hidden_size, ranks, halves, model.add_bias_linear
        )
        yield Linear(f"{mlp}.linear_fc2", "row", model.hidden_size, width, ranks, has_bias=model.add_bias_linear)


def _norm(name: str, width: int, model: Architecture) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (width,))
    if model.normalization == "LayerNorm":
        yield Parameter(f"{name}.bias", (width,))
