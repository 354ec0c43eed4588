"""Layers of Qwen3-Next and Qwen3.5: gated DeltaNet, and attention with an output gate.

A gated delta rule stores a matrix ``S`` per head instead of keys and values. With a decay ``a`` and a strength ``b``
between 0 and 1, projected from the input, each token does::

    S <- a S;   S <- S + b k (v - S^T k)^T;   output = S^T q
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.families.architecture import Architecture, ExpertShare
from megatron_rl.families.parts import Linear, Parameter, Part, StateCache

DELTA_NAMES = {"self_attention.out_norm": "linear_attn.norm"} | {
    f"self_attention.{name}": f"linear_attn.{name}"
    for name in (
        "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "conv1d", "A_log",
        "dt_bias", "out_proj",
    )
}  # fmt: skip


def _sizes(model: Architecture, ranks: int = 1) -> tuple[int, int, int]:
    """Return the widths of all keys and of all values on a rank, and its number of value heads."""
    heads = model.linear_num_value_heads // ranks
    return model.linear_num_key_heads // ranks * model.linear_key_head_dim, heads * model.linear_value_head_dim, heads


def delta_parts(name: str, model: Architecture, ranks: int, _: ExpertShare) -> Iterator[Part]:
    """Yield the parameters of the delta rule; one projection produces all inputs, including gate and decay.

    The rows of a key head and its value heads are adjacent, so that ranks have whole heads.
    """
    keys, values, heads = _sizes(model)
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


def delta_kept(model: Architecture, ranks: int, _: ExpertShare, again: bool) -> int:
    """Count the numbers stored per token; everything between the projections is always recomputed."""
    del again
    keys, values, heads = _sizes(model, ranks)
    return 2 * keys + 2 * values + 2 * heads + values


def delta_cache(model: Architecture, ranks: int) -> StateCache:
    """Return the sizes of the state and of the convolution's past inputs."""
    keys, values, heads = _sizes(model, ranks)
    widths = model.linear_key_head_dim, model.linear_value_head_dim
    return StateCache(heads, *widths, 2 * keys + values, model.linear_conv_kernel_dim - 1)


def gated_kept(model: Architecture, ranks: int, _: ExpertShare, again: bool) -> int:
    """Count the projection, normalised and rotated queries and keys, and the result padded, packed and gated."""
    query = model.num_attention_heads // ranks * model.kv_channels
    key = max(1, model.num_query_groups // ranks) * model.kv_channels
    norms = query + key if model.qk_layernorm else 0
    return 2 * query + 2 * key + norms + query + key + (2 if again else 3) * query
