"""What `--load-hf` and `--hf-config` say in place of some forty flags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.config.flags import Flag
from megatron_rl.config.rl_config import all_flags
from megatron_rl.errors import ConfigError, Problem
from megatron_rl.families import read_model

_FREE = ("init_method_std",)
"""How fresh weights are drawn is up to the run."""
FILLED_IN = frozenset({"--num-layers", "--hidden-size", "--num-attention-heads", "--tokenizer-model"})
"""Flags without a default that a directory may replace."""


@dataclass(frozen=True)
class HuggingFaceValues:
    """By field name, what the directory says and the user did not; what contradicts it; what is lost with it."""

    values: dict[str, Any] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    unknown: frozenset[str] = frozenset()
    """Flags that would have been filled in: to call them missing too would repeat the problem."""


def hugging_face_values(typed: Mapping[str, Any]) -> HuggingFaceValues:
    """Read the directory that the flags name, if they name one."""
    given = {name: typed[name] for name in ("load_hf", "hf_config") if typed.get(name) is not None}
    if not given:
        return HuggingFaceValues()
    if len({Path(directory).resolve() for directory in given.values()}) > 1:
        both = " and ".join(f"--{name.replace('_', '-')} {directory}" for name, directory in given.items())
        problem = Problem("--hf-config", f"{both} both say what the model is; keep one of them")
        return HuggingFaceValues(problems=(problem,), unknown=FILLED_IN)
    (name, directory), *_ = given.items()
    try:
        settings = read_model(directory).architecture.settings()
    except ConfigError as error:
        flag = f"--{name.replace('_', '-')}"
        return HuggingFaceValues(problems=tuple(each.under(flag) for each in error.problems), unknown=FILLED_IN)
    source = str(Path(directory) / "config.json")
    problems = tuple(_contradictions(typed, settings, source))
    settings["group_query_attention"] = True  # megatron ignores the number of groups without it
    if (Path(directory) / "tokenizer_config.json").is_file():
        settings["tokenizer_model"] = str(directory)
    return HuggingFaceValues({name: value for name, value in settings.items() if name not in typed}, problems)


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
