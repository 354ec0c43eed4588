"""The files of `--load-hf`, and whether the tokenizer is of the model."""

from __future__ import annotations

from megatron_rl.config import RLConfig
from megatron_rl.errors import ConfigError
from megatron_rl.families import read_model
from megatron_rl.families.files import weight_problems
from megatron_rl.tokenizer import Tokenizer


def hugging_face_problems(config: RLConfig, tokenizer: Tokenizer | None) -> list[str]:
    """What the headers of all files tell: no weight is read."""
    return [*_weights(config.checkpoint.load_hf), *_tokenizer(config, tokenizer)]


def _weights(directory: str | None) -> list[str]:
    if directory is None:
        return []
    try:
        model = read_model(directory)
    except ConfigError:
        return []  # already reported when the flags were read
    return [f"--load-hf: {line}" for line in weight_problems(model)]


def _tokenizer(config: RLConfig, tokenizer: Tokenizer | None) -> list[str]:
    rows = config.tokenizer.vocab_size
    if rows is None or tokenizer is None or tokenizer.vocab_size <= rows:
        return []
    source = config.checkpoint.load_hf or config.model.hf_config
    whose = f"--vocab-size {rows}" if source is None else f"the model of {source}, whose vocab_size is {rows}"
    return [
        f"tokenizer {tokenizer.name!r} has {tokenizer.vocab_size} tokens, which does not fit {whose}; use the "
        "model's own tokenizer"
    ]
