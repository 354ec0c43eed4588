"""A tiny Llama in a GGUF file, as llama.cpp writes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

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


def write_converted(path: Path, model: torch.nn.Module, architecture: str, **changes: Any) -> Path:
    """Write a model of transformers as llama.cpp's converter does, in F32; ``changes`` are keys, None: left out.

    A change of a name with ``.weight`` or ``.bias`` is a tensor. Names have ``__`` for their dots.
    """
    import gguf

    config, shape = model.config, gguf.MODEL_ARCH_NAMES
    names = gguf.get_tensor_name_map(next(a for a in shape if shape[a] == architecture), config.num_hidden_layers)
    writer = gguf.GGUFWriter(str(path), architecture)
    head = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings, "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "attention.key_length": head,
        "attention.value_length": head, "rope.dimension_count": head, "vocab_size": config.vocab_size,
    }  # fmt: skip
    rope = config.rope_parameters
    keys["rope.freq_base"] = rope.get("full_attention", rope)["rope_theta"]
    if architecture == "gemma3":
        keys["attention.sliding_window"] = config.sliding_window
    changed = {name.replace("__", "."): value for name, value in changes.items()}
    tensors = dict(_converted(model, architecture, names))
    for name, value in changed.items():
        (tensors if name.endswith((".weight", ".bias")) else keys)[name] = value
    for key, value in keys.items():
        _add(writer, key if key.startswith("general.") else f"{architecture}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*TOKENS, *(f"[{n}]" for n in range(len(TOKENS), config.vocab_size))])
    writer.add_token_types([3, 3, 3] + [1] * (config.vocab_size - 3))
    writer.add_token_merges(["t h", "a n"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, values in tensors.items():
        if values is not None:
            writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if value is not None:
        kinds.get(type(value), writer.add_array)(key, value)


def _converted(model: torch.nn.Module, architecture: str, names: Any) -> Iterator[tuple[str, np.ndarray]]:
    heads = {".q_proj.": model.config.num_attention_heads, ".k_proj.": model.config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        count = next((heads[part] for part in heads if part in name), None)
        if architecture == "llama" and count is not None:  # interleaved where transformers has halves
            values = values.reshape(count, 2, values.shape[0] // count // 2, *values.shape[1:])
            values = values.swapaxes(1, 2).reshape(tensor.shape)
        if architecture == "gemma3" and "norm" in name:
            values = values + 1
        module, _, ending = name.rpartition(".")
        yield f"{names.get_name(module)}.{ending}", values
