"""Text to token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rl.config.fields import flag


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer and the size of the vocabulary."""

    tokenizer_type: Literal["HuggingFaceTokenizer"] = flag("HuggingFaceTokenizer")
    """Kind of tokenizer."""
    tokenizer_model: str | None = flag(None, path=True, common=True)
    """Tokenizer: a directory, or a name on the Hugging Face hub."""
    vocab_size: int | None = flag(None, ge=1, le=100_000_000)
    """Rows of the embedding, before padding, where the model has more than the tokenizer has tokens."""
    make_vocab_size_divisible_by: int = flag(128, ge=1, le=1_000_000)
    """Pad the vocabulary to a multiple of this times the tensor-parallel size."""
    tokenizer_hf_include_special_tokens: bool = flag(
        False, note="the chat template says which special tokens a prompt starts with"
    )
    """Megatron's switch for special tokens in encoded text."""
    rl_skip_bos_token: bool = flag(
        False, note="the chat template says whether a prompt starts with a begin token"
    )
    """Megatron's switch against a second begin token."""
