"""Model directories of the Hugging Face format, and ``config.json``, read without ignoring unsupported settings."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.errors import ConfigError, cut, one_line, shorten
from megatron_rl.families.architecture import MOST_LAYERS
from megatron_rl.families.gguf import SUFFIX, cached_import
from megatron_rl.user_files import read_json

_LONGEST_VALUE = 60
_BEYOND_ANY_MODEL = 1e18
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""``Qwen/Qwen2.5-0.5B``; an existing path of this form takes precedence."""
_SMALL_FILES, _WEIGHTS = ("*.json", "*.jinja", "*.txt", "*.model"), ("*.safetensors",)


def model_directory(name: str | Path, weights: bool = False) -> Path:
    """Return ``name``, or the local directory of the hub's files: settings and tokenizer, with ``weights`` all.

    GGUF files are imported into a cache, see `cached_import`. Without a network, or with ``HF_HUB_OFFLINE=1``, the
    hub's cache is used.

    Raises:
        ConfigError: neither a directory nor a readable hub name.
    """
    if str(name).endswith(SUFFIX):
        return _imported(str(name))
    is_name = _HUB_NAME.fullmatch(str(name)) is not None and not Path(name).exists()
    return _fetched(str(name), weights) if is_name else Path(name)


@functools.cache
def _imported(path: str) -> Path:
    """Cached per process: the checksum of a large file takes seconds."""
    return cached_import(Path(path))


@functools.cache
def _fetched(name: str, weights: bool) -> Path:
    """Cached per process, so that a run uses the same files throughout."""
    # imported here: directories need none of it
    import huggingface_hub

    patterns = [*_SMALL_FILES, *(_WEIGHTS if weights else ())]
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # a dozen types: no network, no such name, no access, a full disk
        reason = one_line(str(error), 200) or type(error).__name__
        raise ConfigError([
            f"{name} is no directory here, and cannot be had from the Hugging Face hub ({reason}); give a directory, "
            "or a name that the hub or its cache has"
        ]) from error


class HfConfig:
    """One ``config.json``. Raises ``ConfigError`` for missing values and wrong types; `check` for unsupported settings.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        """``prefix``: printed before keys, if ``values`` are part of another mapping."""
        self.path = path
        self._values, self._prefix = values, prefix
        self._problems: list[str] = []

    def within(self, key: str) -> HfConfig:
        """Return the mapping in ``key``, empty if missing; `check` covers its unsupported settings too."""
        values = self.get(key, {})
        self._valid(key, values, isinstance(values, Mapping), "a mapping")
        part = HfConfig(self.path, values, f"{self._prefix}{key}.")
        part._problems = self._problems
        return part

    @property
    def names(self) -> list[str]:
        """Keys with a value."""
        return [key for key, value in self._values.items() if value is not None]

    def has(self, key: str) -> bool:
        """Return whether the key exists, even as ``null``."""
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """Return the raw value; ``null`` counts as missing."""
        value = self._values.get(key)
        return default if value is None else value

    def whole(self, key: str, default: int | None = None) -> int:
        """Return a whole number of at least 1."""
        value = self._present(key, default)
        fits = _is_number(value) and isinstance(value, int) and value >= 1
        return self._valid(key, value, fits, "a whole number above 0")

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number above 0."""
        value = self._present(key, default)
        return float(self._valid(key, value, _is_number(value) and value > 0, "a number above 0"))

    def factor(self, key: str, default: float | None = None) -> float:
        """Return a number of at least 1."""
        value = self._present(key, default)
        return float(self._valid(key, value, _is_number(value) and value >= 1, "a number of at least 1"))

    def switch(self, key: str, default: bool) -> bool:
        """Return ``true`` or ``false``."""
        value = self._present(key, default)
        return self._valid(key, value, isinstance(value, bool), "true or false")

    def expect(self, key: str, *allowed: Any, why: str) -> None:
        """Refuse values in ``key`` other than ``allowed`` (or none), as unsupported."""
        value = self.get(key)
        if value is not None and value not in allowed:
            self.refuse(key, value, why)

    def refuse(self, key: str, value: Any, why: str) -> None:
        """Record that ``key`` has an unsupported value."""
        shown = cut(json.dumps(value), _LONGEST_VALUE)
        self._problems.append(f"{self.path}: {self._prefix}{key} {shown} is not built here: {why}")

    def rotated_share(self, default: float = 1.0) -> float:
        """Return the rotated part of each head; 1 is all of it."""
        share = self.within("rope_parameters").get("partial_rotary_factor", self.get("partial_rotary_factor", default))
        fits = _is_number(share) and 0 < share <= 1
        return float(self._valid("partial_rotary_factor", share, fits, "a number above 0 and at most 1"))

    def base(self, key: str, default: float | None = None) -> int:
        """Return the base of rotary frequencies, an integer in any notation."""
        base = self._present(key, default)
        fits = _is_number(base) and base >= 1 and base == int(base)
        return int(self._valid(key, base, fits, "a whole number above 0"))

    def windows(self, num_layers: int, every: int, size: int | None = None) -> dict[str, Any]:
        """Return the settings of windows: of ``layer_types``, else of all but one layer in ``every``; ``size``:
        default.
        """
        if num_layers > MOST_LAYERS:
            return {}  # refused elsewhere, before anything is as long
        kinds = self._layer_types(num_layers)
        has_window = [number % every != 0 for number in range(1, num_layers + 1)]
        if kinds is not None:
            has_window = [kind == "sliding_attention" for kind in kinds]
            for kind in sorted(set(kinds) - {"sliding_attention", "full_attention"}):
                self.refuse("layer_types", kind, "layers attend to the whole sequence, or to a sliding window")
        if not any(has_window):
            return {}
        settings = {"window_size": self.whole("sliding_window", size)}
        if all(has_window):
            return settings
        first = has_window.index(False) + 1
        if first == 1 or has_window != [number % first != 0 for number in range(1, num_layers + 1)]:
            self.refuse("layer_types", kinds, "one layer in every few attends to the whole sequence")
        return settings | {"window_attn_skip_freq": max(2, first)}

    def layer_types(self, num_layers: int, other: str | None = None) -> None:
        """Check that listed layers have full attention, or the kind ``other``."""
        for kind in sorted(set(self._layer_types(num_layers) or ()) - {"full_attention", other}):
            self.refuse("layer_types", kind, f"layers are {' or '.join(filter(None, ('full_attention', other)))}")

    def _layer_types(self, num_layers: int) -> list[str] | None:
        kinds = self.get("layer_types")
        if kinds is None:
            return None
        are_names = isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)
        self._valid("layer_types", kinds, are_names, "a list of names")
        if len(kinds) != num_layers:
            raise ConfigError([
                f"{self.path}: layer_types names {len(kinds)} layers where num_hidden_layers is {num_layers}; "
                "take the config.json that the model was published with"
            ])
        return kinds

    def check(self) -> None:
        """Raise all refused settings."""
        if self._problems:
            raise ConfigError(self._problems)

    def _present(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            absent = f"{self.path} lacks {self._prefix}{key}"
            raise ConfigError([f"{absent}; take the config.json that the model was published with"])
        return value

    def _valid(self, key: str, value: Any, fits: bool, what: str) -> Any:
        if not fits:
            raise ConfigError([f"{self.path}: {self._prefix}{key} must be {what}, got {shorten(value)}"])
        return value


def _is_number(value: Any) -> bool:
    # Python's JSON parser accepts NaN, Infinity, and integers beyond float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _BEYOND_ANY_MODEL


def end_token_ids(directory: str | Path) -> tuple[int, ...]:
    """Return ``eos_token_id`` of ``config.json`` and ``generation_config.json``; empty if missing.

    A number, or a list in Llama 3.1 and Qwen2.5 Instruct.

    Raises:
        ConfigError: another type, or ``generation_config.json`` is not a JSON object.
    """
    found: dict[int, None] = {}
    for name in ("config.json", "generation_config.json"):
        path, value = Path(directory) / name, None
        try:
            value = read_object(path).get("eos_token_id")
        except ConfigError:
            if name == "generation_config.json" and os.path.exists(path):  # of config.json, whoever needs it says so
                raise
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(number, bool) or not isinstance(number, int) for number in ids):
            raise ConfigError([f"{path}: eos_token_id must be a token id or a list of them, got {shorten(value)}"])
        found |= dict.fromkeys(ids)
    return tuple(found)


def read_object(path: Path, fault: Callable[[str], Exception] = lambda line: ConfigError([line])) -> dict[str, Any]:
    """Read the JSON object in a model's file; raises ``fault(line)`` if it is not one."""
    try:
        values = read_json(path)
    except ValueError as error:
        advice = "give a directory in the Hugging Face format, with the files that the model was published with"
        raise fault(f"{path} {error}; {advice}") from error
    if not isinstance(values, dict):
        raise fault(
            f"{path} is {shorten(values)} where a mapping of settings belongs; take the file the model was published "
            "with"
        )
    return values
