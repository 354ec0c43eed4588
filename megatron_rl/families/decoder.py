"""The tensors that Llama's naming and all families derived from it share."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.families.architecture import Architecture
from megatron_rl.families.weights import Entry, WeightMap, interleaved


def decoder_weights(model: Architecture) -> WeightMap:
    """The whole map: embedding, layers, final norm, and the head where it has a weight of its own."""
    return WeightMap(_entries(model))


def _entries(model: Architecture) -> Iterator[Entry]:
    table = (model.vocab_size, model.hidden_size)
    yield Entry("embedding.word_embeddings.weight", {"model.embed_tokens.weight": table}, "vocabulary")
    for layer in range(model.num_layers):
        ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
        yield _norm(f"{ours}.input_layernorm", f"{theirs}.input_layernorm", model.hidden_size)
        yield from _attention(model, f"{ours}.self_attention", f"{theirs}.self_attn")
        yield _norm(f"{ours}.pre_mlp_layernorm", f"{theirs}.post_attention_layernorm", model.hidden_size)
        if model.num_experts is None:
            yield from _gated_mlp(f"{ours}.mlp", f"{theirs}.mlp", model.hidden_size, model.ffn_hidden_size)
        else:
            yield from _experts(model, f"{ours}.mlp", f"{theirs}.mlp")
    yield _norm("decoder.final_layernorm", "model.norm", model.hidden_size)
    if model.untie_embeddings_and_output_weights:
        yield Entry("output_layer.weight", {"lm_head.weight": table}, "vocabulary")


def _attention(model: Architecture, ours: str, theirs: str) -> Iterator[Entry]:
    width, groups = model.kv_channels, model.num_query_groups
    query, key = model.num_attention_heads * width, groups * width
    heights = {"q_proj": query, "k_proj": key, "v_proj": key}
    per_group = [height // groups for height in heights.values()]
    for kind in ("weight", "bias") if model.add_qkv_bias else ("weight",):
        shapes = {
            f"{theirs}.{name}.{kind}": (height, model.hidden_size) if kind == "weight" else (height,)
            for name, height in heights.items()
        }
        yield Entry(f"{ours}.linear_qkv.{kind}", shapes, "rows", interleaved(list(shapes), per_group, groups))
    yield Entry(f"{ours}.linear_proj.weight", {f"{theirs}.o_proj.weight": (model.hidden_size, query)}, "columns")
    if model.qk_layernorm:
        yield _norm(f"{ours}.q_layernorm", f"{theirs}.q_norm", width)
        yield _norm(f"{ours}.k_layernorm", f"{theirs}.k_norm", width)


def _experts(model: Architecture, ours: str, theirs: str) -> Iterator[Entry]:
    yield Entry(f"{ours}.router.weight", {f"{theirs}.gate.weight": (model.num_experts, model.hidden_size)}, "none")
    for expert in range(model.num_experts):
        yield from _gated_mlp(
            f"{ours}.experts.local_experts.{expert}", f"{theirs}.experts.{expert}",
            model.hidden_size, model.moe_ffn_hidden_size,
        )  # fmt: skip


def _gated_mlp(ours: str, theirs: str, hidden: int, width: int) -> Iterator[Entry]:
    """Gate and up projection in one parameter, and the projection down."""
    gate_and_up = {f"{theirs}.{name}_proj.weight": (width, hidden) for name in ("gate", "up")}
    yield Entry(f"{ours}.linear_fc1.weight", gate_and_up, "each")
    yield Entry(f"{ours}.linear_fc2.weight", {f"{theirs}.down_proj.weight": (hidden, width)}, "columns")


def _norm(ours: str, theirs: str, width: int) -> Entry:
    return Entry(f"{ours}.weight", {f"{theirs}.weight": (width,)}, "none")
