"""The parameters of one rank by name and size, and the buffer that holds them and their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from megatron_rl.config import RLConfig
from megatron_rl.quantization.names import LinearShape, quantizable_linears

_PARAMETER_START = 64
_BUCKET_END = 128
"""Multiples, in numbers, at which megatron's distributed optimizer starts a parameter and ends a bucket."""
_BUCKET = 40_000_000
_BUCKET_A_REPLICA = 1_000_000
"""Megatron's numbers in a bucket: the first, or with more than 40 replicas the second times the replicas."""


def padded_vocabulary(config: RLConfig, vocab_size: int) -> int:
    """Rows of the embedding over all tensor-parallel ranks: megatron rounds up for them."""
    multiple = config.tokenizer.make_vocab_size_divisible_by * config.parallel.tensor_model_parallel_size
    return math.ceil(max(vocab_size, config.tokenizer.vocab_size or 0) / multiple) * multiple


def parameter_sizes(config: RLConfig, padded_vocab: int) -> dict[str, int]:
    """Name -> numbers on one tensor-parallel rank, in the model's order."""
    model = config.model
    embedding = padded_vocab // config.parallel.tensor_model_parallel_size * model.hidden_size
    sizes = {"embedding.word_embeddings.weight": embedding}
    for linear in quantizable_linears(config):
        sizes |= _before(linear.name, config)
        sizes |= _linear(linear, config)
    sizes |= _norm("decoder.final_layernorm", model.hidden_size, config)
    if model.untie_embeddings_and_output_weights:
        sizes["output_layer.weight"] = embedding
    return sizes


def whole_model_parameters(config: RLConfig, padded_vocab: int) -> int:
    """Numbers of one copy of the model, padding of the vocabulary included."""
    whole = replace(config, parallel=replace(config.parallel, tensor_model_parallel_size=1))
    return sum(parameter_sizes(whole, padded_vocab).values())


def buffer_elements(sizes: Iterable[int], config: RLConfig, replicas: int) -> int:
    """Numbers in the contiguous buffer of megatron's DDP; ``sizes`` in the model's order.

    With the distributed optimizer parameters start aligned and buckets can be cut into equal shards.
    """
    sharded = config.parallel.use_distributed_optimizer
    bucket = max(_BUCKET, _BUCKET_A_REPLICA * replicas) if config.parallel.overlap_grad_reduce else None
    bucket_start = end = 0
    for size in reversed(list(sizes)):
        end = (_round_up(end, _PARAMETER_START) if sharded else end) + size
        if bucket is not None and end - bucket_start >= bucket:
            bucket_start = end = _bucket_end(end, replicas) if sharded else end
    return _bucket_end(end, replicas) if sharded else end


def _bucket_end(end: int, replicas: int) -> int:
    return _round_up(end, math.lcm(replicas, _BUCKET_END))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _before(linear: str, config: RLConfig) -> dict[str, int]:
    """The norms, and the router, that stand before a linear in the layer's order."""
    model = config.model
    layer = "decoder." + ".".join(linear.split(".")[:2])
    if linear.endswith("linear_proj"):
        return _norm(f"{layer}.input_layernorm", model.hidden_size, config)
    if not linear.endswith(("mlp.linear_fc1", "local_experts.0.linear_fc1")):
        return {}
    norms: dict[str, int] = {}
    if model.qk_layernorm:
        norms |= _norm(f"{layer}.self_attention.q_layernorm", model.kv_channels, config)
        norms |= _norm(f"{layer}.self_attention.k_layernorm", model.kv_channels, config)
    norms |= _norm(f"{layer}.pre_mlp_layernorm", model.hidden_size, config)
    if model.num_experts is not None:
        norms[f"{layer}.mlp.router.weight"] = model.num_experts * model.hidden_size
    return norms


def _linear(linear: LinearShape, config: RLConfig) -> Iterator[tuple[str, int]]:
    model = config.model
    yield f"decoder.{linear.name}.weight", linear.rows * linear.columns
    if model.add_bias_linear or (model.add_qkv_bias and linear.name.endswith("linear_qkv")):
        yield f"decoder.{linear.name}.bias", linear.rows


def _norm(name: str, width: int, config: RLConfig) -> dict[str, int]:
    sizes = {f"{name}.weight": width}
    if config.model.normalization == "LayerNorm":
        sizes[f"{name}.bias"] = width
    return sizes
