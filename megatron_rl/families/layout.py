"""The structure of a model by arithmetic: parameters, linears and KV cache of one rank.

`tests/unit/families/test_layout.py` compares it with `GPTModel`; see docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_rl.families.architecture import ALL_EXPERTS, ONE_STAGE, Architecture, ExpertShare, LayerKind, Stages
from megatron_rl.families.blocks import blocks_of
from megatron_rl.families.parts import EMBEDDING, HEAD, LayerCache, Linear, Parameter, Part, StateCache, norm

Head = Literal["vocabulary", "value"]
"""Logits, or a critic's value."""


def own_name(name: str) -> str:
    """Return the name of a norm outside of Transformer Engine, which fuses norms into linears."""
    name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    return name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


@dataclass(frozen=True)
class Layer:
    """A decoder layer."""

    index: int
    """Index in the whole model, from 0."""
    parts: tuple[Part, ...]
    """In megatron's order."""
    cache: LayerCache | StateCache
    kind: LayerKind

    @property
    def linears(self) -> list[Linear]:
        """Linears of attention and MLP or experts, without the router."""
        return [part for part in self.parts if isinstance(part, Linear)]


@dataclass(frozen=True)
class ModelLayout:
    """The part of a model on one rank; equally large on all ranks of a stage."""

    architecture: Architecture
    padded_vocab_size: int
    """Rows of embedding and head over all tensor-parallel ranks."""
    tensor_size: int
    layers: tuple[Layer, ...]
    """Of this stage, chunk by chunk."""
    stages: Stages
    before: tuple[Parameter, ...]
    """Embedding, on the first stage."""
    after: tuple[Parameter, ...]
    """Final norm and head, on the last stage; a tied head, with the embedding's name, only without the embedding."""
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
        """Compute the layout of a rank of pipeline stage ``stage``, counted from 0."""
        is_first, is_last = stage == 0, stage == stages.count - 1
        rows = padded_vocab_size or model.vocab_size
        table, chunks = (rows, model.hidden_size), stages.layers_of(stage, model.num_layers)
        kinds = model.kinds
        after = list(norm("decoder.final_layernorm", model.hidden_size, model))
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
            stages=stages,
            before=(Parameter(EMBEDDING, table, "rows", tensor_size),) if is_first else (),
            after=tuple(after) if is_last else (),
            is_first=is_first,
            is_last=is_last,
            head=head,
        )

    @property
    def is_tied(self) -> bool:
        """Whether the head's weight is the embedding's."""
        return self.head == "vocabulary" and not self.architecture.untie_embeddings_and_output_weights

    @property
    def parameters(self) -> Iterator[Parameter]:
        """Parameters in the order of ``named_parameters`` of this rank's chunks."""
        yield from self.before
        for layer in self.layers:
            for part in layer.parts:
                yield from part.parameters if isinstance(part, Linear) else (part,)
        yield from self.after

    @property
    def linears(self) -> list[Linear]:
        """The linears of all decoder layers, without embedding and head."""
        return [linear for layer in self.layers for linear in layer.linears]

    @property
    def expert_id_bytes(self) -> int:
        """Bytes of an expert number: 1, or 2 from 256 experts on, because the largest number means "unknown"."""
        return 1 if (self.architecture.num_experts or 0) < 256 else 2

    @property
    def expert_bytes(self) -> int:
        """Bytes of a token's expert numbers in a layer (`--rl-router-replay`)."""
        return self.architecture.moe_router_topk * self.expert_id_bytes

    @property
    def most_layers(self) -> int:
        """Largest number of layers of a stage."""
        return max(self.stages.sizes(self.architecture.num_layers))

    @property
    def routing_bytes(self) -> int:
        """`expert_bytes` of all layers of the largest stage."""
        return self.most_layers * self.expert_bytes

    @property
    def key_layers(self) -> list[Layer]:
        """Attention layers; at least one."""
        return [layer for layer in self.layers if isinstance(layer.cache, LayerCache)]

    @property
    def state_layers(self) -> list[Layer]:
        """Layers with a recurrent state."""
        return [layer for layer in self.layers if isinstance(layer.cache, StateCache)]

    def state_bytes(self, itemsize: int) -> int:
        """Return the bytes of a sequence's states on the largest stage; convolution inputs have ``itemsize`` bytes."""
        model = self.architecture
        sizes = [cache_of(kind, model, self.tensor_size).state_bytes(itemsize) for kind in model.kinds]
        return max(sum(sizes[layer] for chunk in stage for layer in chunk) for stage in self._stages)

    @property
    def _stages(self) -> Iterator[list[range]]:
        return (self.stages.layers_of(stage, self.architecture.num_layers) for stage in range(self.stages.count))

    def cache_numbers(self, tokens: int) -> int:
        """Return the cached numbers of a sequence of ``tokens``, on one rank."""
        return sum(layer.cache.numbers(tokens) for layer in self.layers)

    def slot_numbers(self, tokens: int) -> int:
        """Return `cache_numbers` of the stage with the most.

        All stages reserve as much, so their caches hold equally many sequences, and their schedulers decide alike.
        """
        model = self.architecture
        numbers = [cache_of(kind, model, self.tensor_size).numbers(tokens) for kind in model.kinds]
        return max(sum(numbers[layer] for chunk in stage for layer in chunk) for stage in self._stages)


def cache_of(kind: LayerKind, model: Architecture, ranks: int) -> LayerCache | StateCache:
    """Return the cache of a layer of ``kind`` on each of ``ranks`` tensor-parallel ranks."""
    mixer, _ = blocks_of(kind)
    return mixer.cache(model, ranks)


def _layer(index: int, kind: LayerKind, model: Architecture, ranks: int, experts: ExpertShare) -> Layer:
    name, parts = f"layers.{index}", []
    modules = ("self_attention", "mlp"), ("input_layernorm", "pre_mlp_layernorm"), blocks_of(kind)
    for module, before, block in zip(*modules, strict=True):
        if kind.pre_norms:
            parts += norm(f"decoder.{name}.{before}", model.hidden_size, model)
        parts += block.parts(f"{name}.{module}", model, ranks, experts)
        if kind.post_norms:
            parts += norm(f"decoder.{name}.{module}.post_layernorm", model.hidden_size, model)
    return Layer(index, tuple(parts), cache_of(kind, model, ranks), kind)
