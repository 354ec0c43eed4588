"""Qwen3-Next: three layers of the gated delta rule to one of gated attention, experts, and a gated shared expert."""

from __future__ import annotations

from megatron_rl.families.architecture import Architecture
from megatron_rl.families.family import SMALL_DELTA, Family, read_gated_delta, read_qwen
from megatron_rl.families.hf_config import HfConfig
from megatron_rl.families.weights import Entry, Piece, WeightMap, decoder_weights


def _read(config: HfConfig) -> Architecture:
    config.expect("decoder_sparse_step", 1, why="every layer has experts")
    config.expect("mlp_only_layers", [], why="every layer has experts")
    # transformers 5 writes the number of experts under another name than the published files have.
    count = "num_experts" if config.get("num_local_experts") is None else "num_local_experts"
    return read_qwen(
        config,
        num_experts=config.whole(count),
        moe_ffn_hidden_size=config.whole("moe_intermediate_size"),
        moe_router_topk=config.whole("num_experts_per_tok"),
        # Shares of the chosen experts among themselves are those of a softmax over the chosen ones.
        moe_router_pre_softmax=not config.switch("norm_topk_prob", True),
        moe_shared_expert_intermediate_size=config.whole("shared_expert_intermediate_size"),
        moe_shared_expert_gate=True,
        **read_gated_delta(config),
    )


def _weights(model: Architecture) -> WeightMap:
    found = decoder_weights(model, {"shared_experts": "shared_expert"})
    for layer, kind in enumerate(model.kinds):
        if kind.mixer == "delta":
            found[f"decoder.layers.{layer}.self_attention.in_proj.weight"] = _projection(layer, model)
    return found


def _projection(layer: int, model: Architecture) -> Entry:
    """Two tensors, in which the rows of a key head lie together with those of its value heads.

    Example: with 2 key heads and 4 value heads ``in_proj_ba`` is ``b0 b1 a0 a1 b2 b3 a2 a3``; we have ``b`` before
    ``a``.
    """
    keys, share = model.linear_num_key_heads, model.linear_num_value_heads // model.linear_num_key_heads
    key, value = model.linear_key_head_dim, share * model.linear_value_head_dim
    whole, single = (f"model.layers.{layer}.linear_attn.in_proj_{name}.weight" for name in ("qkvz", "ba"))
    tensors: dict[str, tuple[int, ...]] = {}
    order: list[Piece] = []
    for tensor, heights in ((whole, (key, key, value, value)), (single, (share, share))):
        tensors[tensor] = keys * sum(heights), model.hidden_size
        for part, height in enumerate(heights):
            starts = [head * sum(heights) + sum(heights[:part]) for head in range(keys)]
            order += [Piece(tensor, (start, start + height)) for start in starts]
    return Entry(tensors, tuple(order))


_SMALL = {
    **SMALL_DELTA, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip

FAMILY = Family(
    name="qwen3_next",
    class_name="Qwen3NextForCausalLM",
    title="Qwen3-Next",
    read=_read,
    weights=_weights,
    passed_through=("mtp.",),
    examples=(
        {**_SMALL, "norm_topk_prob": True},
        {
            **_SMALL, "linear_num_value_heads": 2, "linear_value_head_dim": 8, "norm_topk_prob": False,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"], "tie_word_embeddings": True,
        },
    ),
)  # fmt: skip
