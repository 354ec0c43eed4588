"""A decode step's forward pass as one function of tensors, which torch.compile can trace through all layers.

It knows dense models that one rank holds whole. `RolloutForward` computes the same from the modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as functional

from megatron_rl.attention.rope import rotate
from megatron_rl.models.gpt import PolicyModel
from megatron_rl.models.layer import RolloutLayer
from megatron_rl.models.linear import WholeColumnLinear, WholeRowLinear
from megatron_rl.models.norm import TorchNorm


def can_be_flat(policy: PolicyModel) -> bool:
    """Whether `flat_step` knows everything that the layers of ``policy`` do; `RolloutForward` has to be short."""
    return all(_is_flat(layer) for layer in policy.gpt.decoder.layers)


def _is_flat(layer: RolloutLayer) -> bool:
    attention, mlp = layer.self_attention, layer.mlp
    return (
        layer.has_plain_heads
        and layer.has_plain_mlp
        and all(isinstance(norm, TorchNorm) for norm in (layer.input_layernorm, layer.pre_mlp_layernorm))
        and all(isinstance(linear, WholeColumnLinear) for linear in (attention.linear_qkv, mlp.linear_fc1))
        and all(isinstance(linear, WholeRowLinear) for linear in (attention.linear_proj, mlp.linear_fc2))
    )


class _Product(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def of(cls, linear: torch.nn.Module) -> _Product:
        return cls(linear.weight, linear.bias)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        product = torch.mm(hidden, self.weight.t())
        return product if self.bias is None else product + self.bias


class _Norm(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor | None
    epsilon: float

    @classmethod
    def of(cls, norm: TorchNorm) -> _Norm:
        return cls(norm.weight, norm.bias, norm.eps)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        shape = self.weight.shape
        if self.bias is None:
            return functional.rms_norm(hidden, shape, self.weight, self.epsilon)
        return functional.layer_norm(hidden, shape, self.weight, self.bias, self.epsilon)


class _Layer(NamedTuple):
    norm: _Norm
    qkv: _Product
    proj: _Product
    mlp_norm: _Norm
    fc1: _Product
    fc2: _Product

    @classmethod
    def of(cls, layer: RolloutLayer) -> _Layer:
        attention, mlp = layer.self_attention, layer.mlp
        return cls(
            _Norm.of(layer.input_layernorm), _Product.of(attention.linear_qkv), _Product.of(attention.linear_proj),
            _Norm.of(layer.pre_mlp_layernorm), _Product.of(mlp.linear_fc1), _Product.of(mlp.linear_fc2),
        )  # fmt: skip


class FlatModel(NamedTuple):
    embedding: torch.Tensor
    layers: tuple[_Layer, ...]
    norm: _Norm
    head: torch.Tensor
    groups: int
    width: int
    """Of a head."""
    activation: Callable[[torch.Tensor], torch.Tensor]
    is_gated: bool

    @classmethod
    def of(cls, policy: PolicyModel) -> FlatModel:
        gpt, config = policy.gpt, policy.config
        attention = gpt.decoder.layers[0].self_attention
        tied = gpt.share_embeddings_and_output_weights
        return cls(
            gpt.embedding.word_embeddings.weight,
            tuple(_Layer.of(layer) for layer in gpt.decoder.layers),
            _Norm.of(gpt.decoder.final_layernorm),
            gpt.shared_embedding_or_output_weight() if tied else gpt.output_layer.weight,
            attention.num_query_groups_per_partition,
            attention.hidden_size_per_attention_head,
            config.activation_func,
            config.gated_linear_unit,
        )


def flat_step(
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cells: torch.Tensor,
    columns: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    model: FlatModel,
) -> torch.Tensor:
    """One decode step of N rows: ``[N]`` ids and positions -> ``[N, padded V]``; writes its keys and values.

    ``columns`` counts the keys to be read; the rest is as `RolloutContext.next_step` has it.
    """
    hidden = functional.embedding(token_ids, model.embedding)
    seen = columns <= positions[:, None, None, None]
    mask = torch.zeros((), dtype=hidden.dtype).where(seen, float("-inf"))
    for layer, layer_keys, layer_values in zip(model.layers, keys, values, strict=True):
        mixed = layer.qkv(layer.norm(hidden)).view(hidden.shape[0], model.groups, -1, model.width)
        turned = rotate(mixed[:, :, :-1], cos, sin)
        # The next token's key and value are in their places before the layer reads them.
        layer_keys.view(-1, model.width).index_copy_(0, cells, turned[:, :, -1].reshape(-1, model.width))
        layer_values.view(-1, model.width).index_copy_(0, cells, mixed[:, :, -1].reshape(-1, model.width))
        hidden = hidden + layer.proj(_attend(turned[:, :, :-1], layer_keys, layer_values, mask))
        hidden = hidden + layer.fc2(_activate(layer.fc1(layer.mlp_norm(hidden)), model))
    return torch.mm(model.norm(hidden), model.head.t())


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``[N, groups, share, D]``, the layer's cache and ``[N, 1, 1, K]`` -> ``[N, heads * D]``."""
    rows, groups, share, width = query.shape
    length = mask.shape[-1]
    key, value = (cached[:rows, :, :length].flatten(0, 1) for cached in (keys, values))
    scores = torch.bmm((query * width**-0.5).reshape(-1, share, width), key.transpose(1, 2))
    weights = (scores.view(rows, groups, share, length) + mask).softmax(-1)
    return torch.bmm(weights.view(-1, share, length), value).view(rows, groups * share * width)


def _activate(inner: torch.Tensor, model: FlatModel) -> torch.Tensor:
    if not model.is_gated:
        return model.activation(inner)
    gate, up = inner.chunk(2, -1)
    return model.activation(gate) * up
