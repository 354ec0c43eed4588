"""Tiny random models of every family in the Hugging Face format, made and read by transformers alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

SIZES: Mapping[str, Any] = {
    "vocab_size": 20, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
}  # fmt: skip
"""The tokenizer has 16 or 17 tokens: rows beyond belong to none."""
SCALED = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen2": ("qwen2", {"rope_theta": 1e6}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "llama3": ("llama", {"head_dim": 16, "max_position_embeddings": 16384, "rope_parameters": SCALED}),
    "qwen3_experts": ("qwen3_moe", {"head_dim": 16, **EXPERTS}),
}


def write_model(directory: Path, family: str, *, tied: bool = False, dtype: str = "float32", **sizes: Any) -> None:
    """A random model of ``FAMILIES[family]``; biases and norms are random too, and logits spread by about 1."""
    kind, settings = FAMILIES[family]
    config = AutoConfig.for_model(kind, **{**SIZES, **settings, **sizes, "tie_word_embeddings": tied})
    torch.manual_seed(17)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else 0.2 * noise)
    model.to(getattr(torch, dtype)).save_pretrained(directory)


def read_model(directory: Path) -> torch.nn.Module:
    """The model in fp64, so that a difference to the product is the product's rounding and not ours.

    transformers keeps norms and rotary angles in fp32 within.
    """
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **plain)
    # With megatron-core imported in the same process, transformers leaves the buffers without initial values.
    made = dict(AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).named_buffers())
    for name, buffer in model.named_buffers():
        buffer.copy_(made[name])
    return model.double().eval()


def vocabulary_of(directory: Path) -> int:
    """Number of the tokenizer's tokens: rows of the embedding beyond are never drawn.

    transformers gives a Qwen2 model Qwen2's own end-of-text token besides the 16 that are in the file.
    """
    return len(AutoTokenizer.from_pretrained(directory))


def distributions(model: torch.nn.Module, tokens: list[int], vocabulary: int, temperature: float) -> torch.Tensor:
    """Log-probs [T - 1, V] fp64 of what may follow each token but the last; the sequence is alone, not packed."""
    logits = model(torch.tensor([tokens])).logits[0, :-1, :vocabulary]
    return (logits / temperature).log_softmax(-1)
