"""A tiny Llama in a GGUF file, as llama.cpp writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

HIDDEN, HEADS, KV_HEADS, WIDTH, LAYERS = 64, 4, 2, 96, 2
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789Ġ"
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *LETTERS, "th", "an"]


def write_llama(path: Path, quantised: bool = True, architecture: str = "llama", seed: int = 0) -> Path:
    """Write a model of two layers, its matrices in Q8_0 where ``quantised``, with a byte-level tokenizer."""
    import gguf

    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["t h", "a n"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}<|im_start|>")
    draw = np.random.default_rng(seed)
    for name, shape in _shapes().items():
        values = draw.standard_normal(shape).astype(np.float32) * 0.1
        if len(shape) == 1:
            writer.add_tensor(name, values + 1)
        elif quantised:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    key = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,), f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HIDDEN, HIDDEN), f"blk.{layer}.attn_k.weight": (key, HIDDEN),
            f"blk.{layer}.attn_v.weight": (key, HIDDEN), f"blk.{layer}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_gate.weight": (WIDTH, HIDDEN), f"blk.{layer}.ffn_up.weight": (WIDTH, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, WIDTH),
        }  # fmt: skip
    return shapes
