"""The tokenizer."""

from __future__ import annotations

from megatron_rl.config import RLConfig
from megatron_rl.errors import ConfigError
from megatron_rl.tokenizer import Tokenizer, load_tokenizer


def tokenizer_problems(config: RLConfig) -> tuple[Tokenizer | None, list[str]]:
    """The tokenizer for the checks that need it, or None with the reasons."""
    if config.tokenizer.tokenizer_model is None:
        return None, []  # already reported as a missing flag
    try:
        return load_tokenizer(config.tokenizer.tokenizer_model), []
    except ConfigError as error:
        return None, list(error.problems)
