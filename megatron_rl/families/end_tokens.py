"""The tokens that end an answer, where a model has more of them than its tokenizer names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_rl.errors import ConfigError, shorten
from megatron_rl.json_text import parse_json

_FILES = ("config.json", "generation_config.json")


def end_token_ids(directory: str | Path) -> tuple[int, ...]:
    """``eos_token_id`` of both files, a number or a list (Llama 3.1, Qwen2.5 Instruct); empty where they say nothing.

    Raises:
        ConfigError: it is something else, or ``generation_config.json`` is not JSON.
    """
    found: dict[int, None] = {}
    for name in _FILES:
        path = Path(directory) / name
        value = _read(path).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(number, bool) or not isinstance(number, int) for number in ids):
            raise ConfigError([f"{path}: eos_token_id must be a token id or a list of them, got {shorten(value)}"])
        found |= dict.fromkeys(ids)
    return tuple(found)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except OSError:
        return {}
    except ValueError as error:
        if path.name == "config.json":  # whoever needs it says so
            return {}
        raise ConfigError([f"{path} is not JSON ({error}); take the file the model was published with"]) from error
    return values if isinstance(values, dict) else {}
