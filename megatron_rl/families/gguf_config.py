"""The keys of a GGUF file in the words of ``config.json``; one that is not understood is refused.

llama.cpp computes with each of them, and with ``rope_freqs.weight``, by which it scales positions as Llama 3.1 has it;
transformers passes over what it does not know.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from megatron_rl.errors import ConfigError, shorten
from megatron_rl.families.rotation import LLAMA3

_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
_KEYS = {
    "context_length": "max_position_embeddings", "block_count": "num_hidden_layers", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}  # fmt: skip
_IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}
_LOCAL_BASE = 10000.0
"""Of rotary positions in Gemma's windows, and in Llama where a file does not say."""
_GEMMA_27B = 62
"""Layers of the one size whose attention scores llama.cpp scales by another width than a head's."""
_TAKE = "take the model's safetensors"


def settings_of(path: Path, reader: Any) -> dict[str, Any]:
    """Return ``config.json`` of the model in ``path``, as ``gguf``'s ``reader`` has it, without its architecture.

    Raises:
        ConfigError: of an architecture or a key that is not translated.
    """
    name, tensors = reader.fields["general.architecture"].contents(), {each.name: each for each in reader.tensors}
    if name not in _MODEL_TYPES:
        known = ", ".join(_MODEL_TYPES)
        raise ConfigError([f"{path}: architecture {shorten(name)} is not read from GGUF, only {known}; {_TAKE}"])
    values = {key: each.contents() for key, each in reader.fields.items() if key.startswith(f"{name}.")}

    def take(key: str, default: Any = None) -> Any:
        value = values.pop(f"{name}.{key}", default)
        if value is None or isinstance(value, list):
            what = f"{name}.{key} must be one value for all layers, got {shorten(value)}"
            raise ConfigError([f"{path}: {what}; {_TAKE}"])
        return value

    found = {theirs: take(key) for key, theirs in _KEYS.items()}
    layers, width = found["num_hidden_layers"], found["hidden_size"] // found["num_attention_heads"]
    if layers > len(tensors):
        raise ConfigError([f"{path} has {len(tensors)} tensors for {layers} layers; fetch it anew"])
    rows, head = tensors["token_embd.weight"].shape[-1], take("attention.key_length", width)
    rope = {"rope_type": "default", "rope_theta": take("rope.freq_base", _LOCAL_BASE if name == "llama" else None)}
    if values.get(f"{name}.rope.scaling.type") in ("none", "linear"):
        kind, factor = take("rope.scaling.type"), take("rope.scaling.factor", 1)
        rope |= {"rope_type": "linear", "factor": factor} if kind == "linear" and factor not in (0, 1) else {}
    if name == "llama" and rope["rope_type"] == "default" and "rope_freqs.weight" in tensors:
        rope |= _llama3(path, tensors["rope_freqs.weight"].data, rope["rope_theta"], head)
    if name == "gemma3":
        found |= {"sliding_window": take("attention.sliding_window")}
        found |= {"query_pre_attn_scalar": width if layers == _GEMMA_27B else head}
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": _LOCAL_BASE}}
    built = {
        "attention.value_length": head, "rope.dimension_count": head, "vocab_size": rows, "attention.causal": True,
        "attention.sliding_window_pattern": 6, "rope.freq_base_swa": _LOCAL_BASE, "rope.scaling.finetuned": False,
    }  # fmt: skip
    for key, value in values.items():
        if value != built.get(key.removeprefix(f"{name}."), math.nan):  # which nothing equals
            raise ConfigError([f"{path}: {key} {shorten(value)} is not read from GGUF; {_TAKE}"])
    ids = {theirs: reader.fields.get(f"tokenizer.ggml.{key}") for key, theirs in _IDS.items()}
    return found | {key: each.contents() for key, each in ids.items() if each is not None} | {
        "model_type": _MODEL_TYPES[name], "vocab_size": int(rows), "head_dim": head, "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in tensors,
    }  # fmt: skip


def _llama3(path: Path, divisors: Any, base: float, head: int) -> dict[str, Any]:
    """Return the scaling by which llama.cpp divides frequencies, [head / 2], if it is that of Llama 3.1 to 3.3."""
    import numpy as np

    factor, (low, high, length) = float(divisors.max()), LLAMA3.values()
    turns = length / (2 * math.pi) * base ** (-np.arange(0, head, 2) / head)
    smooth = ((turns - low) / (high - low)).clip(0, 1)
    wanted = 1 / ((1 - smooth) / factor + smooth)
    if divisors.shape != wanted.shape or not np.allclose(divisors, wanted, rtol=1e-4):
        raise ConfigError([f"{path}: rope_freqs.weight is not the scaling of Llama 3.1; {_TAKE}"])
    return {} if factor == 1 else {"rope_type": "llama3", "factor": factor, **LLAMA3}
