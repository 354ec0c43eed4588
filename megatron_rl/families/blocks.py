"""Mixers and MLPs of decoder layers by name, without torch.

A block describes its parameters and linears, its tensors in a Hugging Face checkpoint, and what it stores per token.
Its modules and its rollout step are in the file of the same name in `megatron_rl/models/blocks`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial

from megatron_rl.errors import ConfigError
from megatron_rl.families.architecture import PLAIN, Architecture, ExpertShare, LayerKind
from megatron_rl.families.parts import Block, LayerCache, Linear, Parameter, Part, StateCache, norm


def _heads(name: str, model: Architecture, ranks: int, _: ExpertShare, with_gates: bool = False) -> Iterator[Part]:
    hidden, width, bias = model.hidden_size, model.kv_channels, model.add_bias_linear
    heads, groups = model.num_attention_heads, model.num_query_groups
    queries = 2 * heads if with_gates else heads  # each query head is followed by its gate
    # Rows by group: its queries, key and value.
    stripes = ("q_proj", queries // groups * width), ("k_proj", width), ("v_proj", width)
    outputs = (queries + 2 * groups) * width
    if model.softmax_type == "learnable":
        yield Parameter(f"decoder.{name}.core_attention.softmax_offset", (heads,), "rows", ranks)
    yield Linear(f"{name}.linear_proj", "row", hidden, heads * width, ranks, bias)
    yield Linear(f"{name}.linear_qkv", "column", outputs, hidden, ranks, bias or model.add_qkv_bias, stripes=stripes)
    if model.qk_layernorm:
        of_query, of_key = (heads, groups) if model.qk_layernorm_across_heads else (1, 1)
        yield from norm(f"decoder.{name}.q_layernorm", of_query * width, model)
        yield from norm(f"decoder.{name}.k_layernorm", of_key * width, model)


def _heads_cache(model: Architecture, ranks: int) -> LayerCache:
    # With fewer groups than ranks, a rank stores part of a group, but gathers and caches all of it.
    return LayerCache(max(1, model.num_query_groups // ranks), model.kv_channels, model.kv_channels)


def _heads_kept(model: Architecture, ranks: int, _: ExpertShare, again: bool) -> int:
    cache = _heads_cache(model, ranks)
    query = model.num_attention_heads // ranks * model.kv_channels
    key, both = cache.heads * cache.key_width, cache.numbers(1)
    if again:
        return 3 * query + key + both + (query if model.qk_layernorm else 0)
    return 3 * query + both + (2 * query + both if model.qk_layernorm else 0)


def _latent(name: str, model: Architecture, ranks: int, _: ExpertShare) -> Iterator[Part]:
    hidden, heads, rotated = model.hidden_size, model.num_attention_heads, model.qk_pos_emb_head_dim
    queries, both = heads * (model.qk_head_dim + rotated), heads * (model.qk_head_dim + model.v_head_dim)
    yield Linear(f"{name}.linear_proj", "row", hidden, heads * model.v_head_dim, ranks)
    if model.q_lora_rank is None:
        yield Linear(f"{name}.linear_q_proj", "column", queries, hidden, ranks)
    else:
        yield Linear(f"{name}.linear_q_down_proj", "column", model.q_lora_rank, hidden, ranks)
        yield Linear(f"{name}.linear_q_up_proj", "column", queries, model.q_lora_rank, ranks)
    yield Linear(f"{name}.linear_kv_down_proj", "column", model.kv_lora_rank + rotated, hidden, ranks)
    yield Linear(f"{name}.linear_kv_up_proj", "column", both, model.kv_lora_rank, ranks)
    if model.q_lora_rank is not None:
        yield from norm(f"decoder.{name}.q_layernorm", model.q_lora_rank, model)
    yield from norm(f"decoder.{name}.kv_layernorm", model.kv_lora_rank, model)


def _latent_cache(model: Architecture, ranks: int) -> LayerCache:
    if model.rl_mla_absorb:  # the same on every rank: all heads read it
        return LayerCache(1, model.kv_lora_rank + model.qk_pos_emb_head_dim, model.kv_lora_rank, is_latent=True)
    key = model.qk_head_dim + model.qk_pos_emb_head_dim
    return LayerCache(model.num_attention_heads // ranks, key, model.v_head_dim)


def _latent_kept(model: Architecture, ranks: int, _: ExpertShare, again: bool) -> int:
    heads, rotated = model.num_attention_heads // ranks, model.qk_pos_emb_head_dim
    key, value = model.qk_head_dim + rotated, model.v_head_dim
    latents = 2 * ((model.q_lora_rank or 0) + model.kv_lora_rank) + rotated  # as projected, and normalised
    # Concatenated queries and keys; values, padded or as projected; the result, padded and not.
    return latents + heads * (2 * key + (model.qk_head_dim + 2 * value if again else 3 * value))


def _mlp(name: str, model: Architecture, width: int, ranks: int) -> Iterator[Linear]:
    hidden, bias, halves = model.hidden_size, model.add_bias_linear, 2 if model.is_gated else 1
    stripes = (("gate_proj", width), ("up_proj", width)) if model.is_gated else ()
    yield Linear(f"{name}.linear_fc1", "column", halves * width, hidden, ranks, bias, halves, stripes)
    yield Linear(f"{name}.linear_fc2", "row", hidden, width, ranks, bias)


def _dense(name: str, model: Architecture, ranks: int, _: ExpertShare) -> Iterator[Part]:
    yield from _mlp(name, model, model.ffn_hidden_size, ranks)


def _dense_kept(model: Architecture, ranks: int, _: ExpertShare, again: bool) -> int:
    return 0 if again else _whole_kept(model, model.ffn_hidden_size // ranks)


def _whole_kept(model: Architecture, width: int) -> int:
    """Count the numbers of a token for an MLP that every token uses."""
    return 3 * width if model.swiglu else _mlp_kept(model, width)


def _mlp_kept(model: Architecture, width: int) -> int:
    bounded = 2 if model.activation_func_clamp_value is not None else 0  # the gate again, and up
    return ((5 if model.is_gated else 2) + bounded + (1 if model.quick_geglu else 0)) * width


def _experts(name: str, model: Architecture, ranks: int, share: ExpertShare) -> Iterator[Part]:
    yield Parameter(f"decoder.{name}.router.weight", (model.num_experts, model.hidden_size))
    if model.add_bias_linear:
        yield Parameter(f"decoder.{name}.router.bias", (model.num_experts,))
    if model.moe_router_enable_expert_bias:
        bias = f"decoder.{name}.router.expert_bias"
        yield Parameter(bias, (model.num_experts,), is_buffer=True, is_stored_in_fp32=True)
    for expert in share.of(model.num_experts):
        single = f"{name}.experts.local_experts.{expert}"
        yield from _mlp(single, model, model.moe_ffn_hidden_size, share.tensor_size or ranks)
    if model.moe_shared_expert_intermediate_size is not None:
        if model.moe_shared_expert_gate:
            yield Parameter(f"decoder.{name}.shared_experts.gate_weight", (1, model.hidden_size))
        yield from _mlp(f"{name}.shared_experts", model, model.moe_shared_expert_intermediate_size, ranks)


def _experts_kept(model: Architecture, ranks: int, share: ExpertShare, again: bool) -> int:
    cut = share.tensor_size or ranks
    # Each token is copied to and from each of its experts.
    copies = 3 if model.add_bias_linear else 2  # the output's bias is weighed like the output
    each = _mlp_kept(model, model.moe_ffn_hidden_size // cut) + copies * model.hidden_size
    # Whoever has whole experts gets as many fewer tokens: as many as it sends, with experts equally busy.
    routed = (model.moe_router_topk * each + 2 * model.num_experts) * cut // ranks
    shared = _whole_kept(model, (model.moe_shared_expert_intermediate_size or 0) // ranks)
    return 0 if again else routed + shared + (model.hidden_size if model.moe_shared_expert_gate else 0)


_ATTENTION = {
    "self_attention": "self_attn", "linear_proj": "o_proj", "q_layernorm": "q_norm", "k_layernorm": "k_norm",
    "core_attention.softmax_offset": "sinks",
}  # fmt: skip
_MLP = {"linear_fc1": "up_proj", "linear_fc2": "down_proj"}
_LATENT = {
    "self_attention": "self_attn", "linear_proj": "o_proj", "linear_q_proj": "q_proj", "linear_q_down_proj": "q_a_proj",
    "linear_q_up_proj": "q_b_proj", "linear_kv_down_proj": "kv_a_proj_with_mqa", "linear_kv_up_proj": "kv_b_proj",
    "q_layernorm": "q_a_layernorm", "kv_layernorm": "kv_a_layernorm",
}  # fmt: skip
_OF_HEADS = frozenset({"rotation", "window", "scale", "sinks", "norm_across_heads"})
_EXPERTS = _MLP | {
    "router": "gate", "router.expert_bias": "gate.e_score_correction_bias", "experts.local_experts": "experts",
    "shared_experts.gate_weight": "shared_expert_gate.weight",
}  # fmt: skip

_DELTA_NAMES = {"self_attention.out_norm": "linear_attn.norm"} | {
    f"self_attention.{name}": f"linear_attn.{name}"
    for name in (
        "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "conv1d", "A_log",
        "dt_bias", "out_proj",
    )
}  # fmt: skip


def _delta_sizes(model: Architecture, ranks: int = 1) -> tuple[int, int, int]:
    """Return the widths of all keys and of all values on a rank, and its number of value heads."""
    heads = model.linear_num_value_heads // ranks
    return model.linear_num_key_heads // ranks * model.linear_key_head_dim, heads * model.linear_value_head_dim, heads


def _delta_parts(name: str, model: Architecture, ranks: int, _: ExpertShare) -> Iterator[Part]:
    """Yield the parameters of the delta rule; one projection produces all inputs, including gate and decay.

    It stores a matrix ``S`` per head instead of keys and values. With a decay ``a`` and a strength ``b`` between 0 and
    1, projected from the input, each token does::

        S <- a S;   S <- S + b k (v - S^T k)^T;   output = S^T q

    The rows of a key head and its value heads are adjacent, so that ranks have whole heads.
    """
    keys, values, heads = _delta_sizes(model)
    key, value, share = model.linear_key_head_dim, *(size // model.linear_num_key_heads for size in (values, heads))
    in_turn = key, key, value
    if model.linear_joint_projections:
        stripes = ("in_proj_qkvz", 2 * key + 2 * value), ("in_proj_ba", 2 * share)
    else:
        each = ("in_proj_z", value), ("in_proj_b", share), ("in_proj_a", share)
        stripes = *(("in_proj_qkv", rows) for rows in in_turn), *each
    channels, outputs = 2 * keys + values, 2 * keys + 2 * values + 2 * heads
    for part in ("A_log", "dt_bias"):
        yield Parameter(f"decoder.{name}.{part}", (heads,), "rows", ranks, is_stored_in_fp32=True)
    yield Parameter(
        f"decoder.{name}.short_conv.weight", (channels, 1, model.linear_conv_kernel_dim), "rows", ranks,
        stripes=tuple(("conv1d", rows) for rows in in_turn),
    )  # fmt: skip
    yield Linear(f"{name}.in_proj", "column", outputs, model.hidden_size, ranks, stripes=stripes)
    yield Parameter(f"decoder.{name}.out_norm.weight", (model.linear_value_head_dim,), is_stored_in_fp32=True)
    yield Linear(f"{name}.out_proj", "row", model.hidden_size, values, ranks)


def _delta_kept(model: Architecture, ranks: int, _: ExpertShare, again: bool) -> int:
    """Count the numbers stored per token; everything between the projections is always recomputed."""
    del again
    keys, values, heads = _delta_sizes(model, ranks)
    return 2 * keys + 2 * values + 2 * heads + values


def _delta_cache(model: Architecture, ranks: int) -> StateCache:
    """Return the sizes of the state and of the convolution's past inputs."""
    keys, values, heads = _delta_sizes(model, ranks)
    widths = model.linear_key_head_dim, model.linear_value_head_dim
    return StateCache(heads, *widths, 2 * keys + values, model.linear_conv_kernel_dim - 1)


def _gated_kept(model: Architecture, ranks: int, _: ExpertShare, again: bool) -> int:
    """Count the projection, normalised and rotated queries and keys, and the result padded, packed and gated."""
    query = model.num_attention_heads // ranks * model.kv_channels
    key = max(1, model.num_query_groups // ranks) * model.kv_channels
    norms = query + key if model.qk_layernorm else 0
    return 2 * query + 2 * key + norms + query + key + (2 if again else 3) * query


BLOCKS: Mapping[str, Block] = {
    "heads": Block(_heads, _heads_kept, _ATTENTION, _OF_HEADS, _heads_cache),
    "latent": Block(_latent, _latent_kept, _LATENT, frozenset({"rotation", "scale"}), _latent_cache,
                    varies="latents are expanded in prompts and not in decode steps"),
    "gated": Block(partial(_heads, with_gates=True), _gated_kept, _ATTENTION, frozenset({"rotation", "scale"}),
                   _heads_cache),
    "delta": Block(
        _delta_parts, _delta_kept, _DELTA_NAMES, cache=_delta_cache, varies="DeltaNet has chunks in prompts"
    ),
    "dense": Block(_dense, _dense_kept, _MLP),
    "experts": Block(_experts, _experts_kept, _EXPERTS, varies="grouped GEMMs may vary with an expert's tokens"),
}  # fmt: skip


def blocks_of(kind: LayerKind) -> tuple[Block, Block]:
    """Return the mixer and the MLP of a layer.

    Raises:
        ConfigError: an unknown block, or one that does not support the kind.
    """
    for name in (kind.mixer, kind.mlp):
        if name not in BLOCKS:
            raise ConfigError([f"a layer with {name!r} is not built; there are {', '.join(BLOCKS)}"])
    mixer, mlp = BLOCKS[kind.mixer], BLOCKS[kind.mlp]
    known = mixer.computes | mlp.computes | {"mixer", "mlp", "pre_norms", "post_norms"}
    for field in dataclasses.fields(LayerKind):
        value = getattr(kind, field.name)
        if field.name not in known and value != getattr(PLAIN, field.name):
            raise ConfigError([f"a layer with {field.name} {value} is not built of {kind.mixer} and {kind.mlp}"])
    return mixer, mlp
