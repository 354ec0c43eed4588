"""A name of the Hugging Face hub or a GGUF file, where a directory is wanted."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from megatron_rl.errors import ConfigError, one_line
from megatron_rl.families.gguf import SUFFIX, cached_import

NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""``Qwen/Qwen2.5-0.5B``; a path that has one slash looks the same, and is one where it is there."""
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
"""Settings and tokenizer."""
WEIGHTS = ("*.safetensors",)


def model_directory(name: str | Path, weights: bool = False) -> Path:
    """``name`` itself, or where the hub's files of that name lie: settings and tokenizer, with ``weights`` all of it.

    The model of a GGUF file lies in a cache, see `cached_import`.

    Without a network, or with ``HF_HUB_OFFLINE=1``, it is what the cache has.

    Raises:
        ConfigError: there is neither such a directory nor such a name, or it may not be read.
    """
    if str(name).endswith(SUFFIX):
        return _imported(str(name))
    is_name = NAME.fullmatch(str(name)) is not None and not Path(name).exists()
    return _fetched(str(name), weights) if is_name else Path(name)


@functools.cache
def _imported(path: str) -> Path:
    """Once a process: the checksum of a large file takes seconds."""
    return cached_import(Path(path))


@functools.cache
def _fetched(name: str, weights: bool) -> Path:
    """Once a process, so that all of a run has the same files."""
    # imported here: directories need none of it
    import huggingface_hub

    patterns = [*SMALL_FILES, *WEIGHTS] if weights else [*SMALL_FILES]
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # a dozen types: no network, no such name, no access, a full disk
        reason = one_line(str(error), 200) or type(error).__name__
        raise ConfigError([
            f"{name} is no directory here, and cannot be had from the Hugging Face hub ({reason}); give a directory, "
            "or a name that the hub or its cache has"
        ]) from error
