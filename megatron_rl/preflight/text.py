"""The tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config import RLConfig
from megatron_rl.errors import ConfigError
from megatron_rl.tokenizer import Tokenizer, load_tokenizer


def tokenizer_problems(config: RLConfig) -> tuple[Tokenizer | None, list[str]]:
    """The tokenizer for the checks that need it, or None with the reasons."""
    if config.tokenizer.tokenizer_model is None:
        return None, []  # already reported as a missing flag
    try:
        tokenizer = open_tokenizer(config)
    except ConfigError as error:
        return None, error.lines
    return tokenizer, list(_stop_strings(config, tokenizer))


def open_tokenizer(config: RLConfig) -> Tokenizer:
    """`--tokenizer-model`, which knows the end tokens that the model's directory names.

    Raises:
        ConfigError: it cannot be used, or what the directory says of end tokens cannot be read.
    """
    directories = [config.checkpoint.load_hf, config.model.hf_config]
    return load_tokenizer(config.tokenizer.tokenizer_model, [name for name in directories if name is not None])


def _stop_strings(config: RLConfig, tokenizer: Tokenizer) -> Iterator[str]:
    """A special token is no text: alone it is looked for by its id, within other text it is nowhere."""
    strings = config.rollout.rl_stop_strings
    special = [text for text in tokenizer.special_tokens if text] if strings else []
    for string in strings:
        inside = next((text for text in special if text in string), None)
        if inside is not None and string not in special:
            yield (
                f"--rl-stop-strings {string!r} has the special token {inside} within other text, where it is never "
                "found; give the token alone, or the text alone"
            )
