"""Sizes of models, layouts of ranks, and the bytes of a GPU, for `tools/benchmark/scaling.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_rl.config.arguments import read_config
from megatron_rl.config.rl_config import RLConfig


@dataclass(frozen=True)
class Model:
    """Sizes of a model in numbers, a layer's unless said otherwise."""

    name: str
    layers: int
    hidden: int
    query: int
    """Width of all queries together."""
    groups: int
    group_width: int
    """Of a key and its value together."""
    attention: int
    dense: int
    """Of the MLP; 0 where there are experts."""
    expert: int
    """Of one expert."""
    experts: int
    active: int
    """Experts that a token is sent to."""
    head: int
    """Of the output head; the embedding has as many."""
    has_head_norms: bool
    """Queries and keys are normed."""

    @classmethod
    def of(cls, name: str, flags: str, vocabulary: int) -> Model:
        """By the layout of its first layer. ``flags``: its shape, as in the training command."""
        whole = _read(flags)
        layer = _read(flags, "--num-layers 1").layout(vocabulary).layers[0]
        sizes = {"attention": 0, "dense": 0, "experts": 0}
        for linear in layer.linears:
            kind = "attention" if "self_attention" in linear.name else "experts" if "expert" in linear.name else "dense"
            sizes[kind] += linear.outputs * linear.inputs
        experts, hidden = whole.model.num_experts or 0, whole.model.hidden_size
        query = next(linear.inputs for linear in layer.linears if linear.name.endswith("linear_proj"))
        return cls(
            name, whole.model.num_layers, hidden, query, layer.cache.heads, layer.cache.numbers(1) // layer.cache.heads,
            sizes["attention"], sizes["dense"], sizes["experts"] // max(1, experts), experts,
            whole.model.moe_router_topk if experts else 0, hidden * vocabulary, whole.model.qk_layernorm,
        )  # fmt: skip

    @property
    def active_numbers(self) -> int:
        """That a token is multiplied with, head included."""
        return self.layers * (self.attention + self.dense + self.active * self.expert) + self.head

    def cache_numbers(self, tensor: int) -> int:
        """Of a token in one layer on one of ``tensor`` ranks, each of which has a whole group at least."""
        return max(self.groups // tensor, 1) * self.group_width


@dataclass(frozen=True)
class Layout:
    """How ranks share a model."""

    gpus: int
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    context: int = 1

    @property
    def replicas(self) -> int:
        """In updates."""
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def rollout_replicas(self) -> int:
        """Model copies that generate, each other prompts."""
        return self.gpus // (self.tensor * self.pipeline)

    @property
    def attention_groups(self) -> int:
        """Tensor-parallel groups whose rows meet in one expert group."""
        return max(1, self.expert // self.tensor)

    @property
    def spread(self) -> int:
        """Over how many ranks a layer, the stack, a sequence and the experts are spread, multiplied."""
        return self.tensor * self.pipeline * self.context * self.expert

    def __str__(self) -> str:
        parts = {"TP": self.tensor, "PP": self.pipeline, "EP": self.expert, "CP": self.context}
        return " ".join(f"{name}{size}" for name, size in parts.items() if size > 1) or "DP only"


def expert_replicas(layout: Layout) -> int:
    """Ranks with the same part of the experts."""
    return layout.gpus // (layout.pipeline * layout.expert)


def numbers_of_a_rank(model: Model, layout: Layout) -> tuple[float, float]:
    """Parameters of the first stage's ranks: what all ranks of a tensor-parallel group share, and experts."""
    layers = math.ceil(model.layers / layout.pipeline)
    ends = model.head * (2 if layout.pipeline == 1 else 1)
    dense = (layers * (model.attention + model.dense) + ends) / layout.tensor
    return dense, layers * model.experts * model.expert / layout.expert


@dataclass(frozen=True)
class Memory:
    """Bytes of a GPU of the first stage."""

    weights: float
    gradients: float
    optimizer: float
    copies: float
    rest: float
    """Weights that rollouts read unquantised: embedding and head."""
    row: float
    """The KV cache of one sequence of the whole context."""
    activations: float
    """Of an update, logits included."""

    @property
    def training(self) -> float:
        """An update's peak; KV cache and copies have been given up."""
        return self.weights + self.gradients + self.optimizer + self.activations

    def rollout(self, rows: float) -> float:
        """A rollout's with ``rows`` sequences in the cache of this replica."""
        return self.optimizer + self.copies + self.rest + rows * self.row


def memory(model: Model, layout: Layout, context: int, tokens: int) -> Memory:
    """Of a step with bins of ``tokens``, shared by context-parallel ranks."""
    dense, experts = numbers_of_a_rank(model, layout)
    ends = model.head * (2 if layout.pipeline == 1 else 1) / layout.tensor
    state = 12 * (dense / (layout.replicas * layout.context) + experts / expert_replicas(layout))
    weights = dense + experts
    row = context * model.cache_numbers(layout.tensor) * 2 * math.ceil(model.layers / layout.pipeline)
    first, last = (activation_bytes(model, layout, tokens // layout.context, is_last) for is_last in (False, True))
    return Memory(2 * weights, 4 * weights, state, weights - ends, 2 * ends, row, max(first, last))


def activation_bytes(model: Model, layout: Layout, tokens: int, is_last: bool) -> float:
    """Of the first stage, or the last with its logits; all layers recomputed, ``tokens`` on each rank.

    As `run.memory.estimate` counts: inputs of all layers of the micro-batches on their way, and one layer in full.
    """
    border = tokens / layout.tensor * model.hidden
    layers, in_flight = math.ceil(model.layers / layout.pipeline), 1 if is_last else layout.pipeline
    numbers = layers * in_flight * border + tokens * layer_numbers(model, layout)
    if not is_last and layout.pipeline > 1:
        return 2 * numbers
    logits = tokens * model.head / model.hidden / layout.tensor
    return 2 * (numbers + 2 * border + logits + model.head / layout.tensor)


def layer_numbers(model: Model, layout: Layout) -> float:
    """Kept of a token in one layer on a rank: norms, attention with normed heads or without, MLP or chosen experts."""
    query, cache, tensor = model.query / layout.tensor, model.cache_numbers(layout.tensor), layout.tensor
    attention = (5 * query + 2 * cache) if model.has_head_norms else (3 * query + cache)
    if model.experts:  # copies in and out of each expert, on whichever rank it is; the router's numbers
        width = model.expert / (3 * model.hidden)
        mlp = model.active * (5 * width + 2 * model.hidden) / tensor + 2 * model.experts
    else:
        mlp = model.dense / model.hidden / tensor
    return 4 * model.hidden / tensor + attention + mlp


def _read(*flags: str) -> RLConfig:
    """Of a shape's flags; a run would need more, which is not asked."""
    common = "--swiglu --disable-bias-linear --group-query-attention --untie-embeddings-and-output-weights"
    return read_config(" ".join((common, *flags)).split(), 1)[0]
