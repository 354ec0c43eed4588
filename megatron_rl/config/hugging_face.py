"""What `--load-hf` and `--hf-config` say in place of some forty flags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config.flags import Flag
from megatron_rl.config.rl_config import all_flags
from megatron_rl.errors import Problem, collecting
from megatron_rl.families import read_model

_FREE = ("init_method_std",)
"""How fresh weights are drawn is up to the run."""
FILLED_IN = frozenset({"--num-layers", "--hidden-size", "--num-attention-heads", "--tokenizer-model"})
"""Flags without a default that a directory may replace."""


def hugging_face_values(typed: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """By field name, what the directory says that the flags name and the user did not; and what contradicts it.

    There are no values where it cannot be read.
    """
    given = {f"--{name.replace('_', '-')}": typed[name] for name in ("load_hf", "hf_config") if typed.get(name)}
    if not given:
        return {}, []
    if len({Path(directory).resolve() for directory in given.values()}) > 1:
        both = " and ".join(f"{flag} {directory}" for flag, directory in given.items())
        return {}, [Problem("--hf-config", f"{both} both say what the model is; keep one of them")]
    (flag, directory), *_ = given.items()
    problems: list[Problem] = []
    settings: dict[str, Any] = {}
    with collecting(problems, flag):
        settings = read_model(directory).architecture.settings()
        problems += _contradictions(typed, settings, str(Path(directory) / "config.json"))
        settings["group_query_attention"] = True  # megatron ignores the number of groups without it
        if (Path(directory) / "tokenizer_config.json").is_file():
            settings["tokenizer_model"] = str(directory)
    return {name: value for name, value in settings.items() if name not in typed}, problems


def _contradictions(typed: Mapping[str, Any], settings: Mapping[str, Any], source: str) -> Iterator[Problem]:
    for flag in all_flags():
        if flag.name not in typed or flag.name not in settings or flag.name in _FREE:
            continue
        wanted, found = typed[flag.name], settings[flag.name]
        fits = wanted <= found if flag.name == "max_position_embeddings" else wanted == found
        if not fits:
            yield Problem(
                flag.spelling,
                f"{_as_typed(flag, wanted)} contradicts {source}, which means {_as_typed(flag, found)}; leave the flag "
                "out, or take another model",
            )


def _as_typed(flag: Flag, value: Any) -> str:
    if flag.kind is bool:
        return next(f"--{spelling}" for spelling, switches_on in flag.spellings.items() if switches_on == value)
    name = f"--{flag.name.replace('_', '-')}"
    return f"no {name}" if value is None else f"{name} {value}"
