"""megatron-rl convert FILE > run.yaml: write a configuration of verl or TRL as ours.

FILE is verl's or TRL's YAML, or a Python file that calls GRPOConfig(...) or LoraConfig(...), which is parsed and never
run. What has no counterpart becomes a comment with the reason. The table is that of docs/coming_from.md.
"""

from __future__ import annotations

import ast
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

import yaml

from megatron_rl.config.arguments import value_of
from megatron_rl.config.rl_config import all_flags
from megatron_rl.errors import ConfigError, one_line
from megatron_rl.main import refuse
from megatron_rl.user_files import read_text

OPERATIONS = {" × ": math.prod, " + ": sum, " / ": lambda pair: pair[0] // pair[1]}
VALUES = {"low_var_kl": "k3", "mse": "k2", "kl": "k1", "seq-mean-token-mean": "sequence-mean", "vanilla": "clip",
          "adamw_torch": "adam", "constant_with_warmup": "constant", "all-linear": "all"}  # fmt: skip
CALLS = {"GRPOConfig": "", "LoraConfig": "peft_config."}
"""Calls that are read of a Python file, and what is put before their keywords."""


def main(words: Sequence[str]) -> int:
    """Return 0, or 2 with one line that says why the file cannot be read."""
    if len(words) != 1 or words[0].startswith("-"):
        sys.stdout.write(f"usage: megatron-rl convert FILE\n\n{__doc__}")
        return 0 if words and words[0] in ("-h", "--help") else 2
    try:
        found = settings_of(words[0])
    except (ValueError, SyntaxError, yaml.YAMLError, RecursionError) as error:
        return refuse(ConfigError([f"{words[0]} cannot be converted: {one_line(str(error))}"]).problems)
    sys.stdout.writelines(f"{line}\n" for line in converted(found))
    return 0


def settings_of(path: str) -> dict[str, Any]:
    """Return dotted key -> value, without verl's ``actor_rollout_ref.``; ``ValueError`` where there is none."""
    text = read_text(path)
    if path.endswith(".py"):
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        before = [(each, CALLS.get(ast.unparse(each.func).rpartition(".")[2])) for each in calls]
        words = [(name, word) for each, name in before if name is not None for word in each.keywords if word.arg]
        found = {name + word.arg: _literal(word.value) for name, word in words}
    else:
        found = yaml.safe_load(text)
    if not isinstance(found, Mapping) or not found:
        raise ValueError("it has no settings; give verl's or TRL's YAML, or a Python file with GRPOConfig(...)")
    return {key.removeprefix("actor_rollout_ref."): value for key, value in _flat(found, "")}


def _literal(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)  # computed: it fits no flag that wants a number, and is shown as it stands


def _flat(values: Mapping[Any, Any], before: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        nested = isinstance(value, Mapping) and name != "chat_template_kwargs"
        yield from _flat(value, f"{before}{name}.") if nested else [(f"{before}{name}", value)]


def converted(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of our file: a flag each, then comments."""
    flags: dict[str, str | list[str]] = {"perform-rl-step": "true"}
    comments: dict[str, str | None] = dict.fromkeys(settings, "there is no such setting here")
    for line in files("megatron_rl.config").joinpath("foreign_flags.txt").read_text(encoding="utf-8").splitlines():
        left, right = line.split(" | ")
        sign = next((sign for sign in OPERATIONS if sign in left), ", ")
        names, ours = left.split(sign), right.replace("–", "").split(", ")
        if sign != ", " and all(isinstance(settings.get(name), int) and settings[name] > 0 for name in names):
            flags[right.removeprefix("--")] = str(OPERATIONS[sign]([settings[name] for name in names]))
            comments |= dict.fromkeys(names)
        elif sign == ", ":
            for name, use in zip(names, ours if len(ours) == len(names) else ours * len(names), strict=True):
                _one(name, use, settings, flags, comments)
    is_plain = re.compile(r"[\w./+-]+").fullmatch
    for name, value in flags.items():
        yield f"{name}: {value if isinstance(value, str) and is_plain(value) else json.dumps(value)}"
    left_out = {name: why for name, why in comments.items() if why and settings[name] is not None}
    yield from (f"# {name}: {one_line(str(settings[name]), 60)}  ({why})" for name, why in left_out.items())


def _one(
    name: str,
    use: str,
    settings: Mapping[str, Any],
    flags: dict[str, str | list[str]],
    comments: dict[str, str | None],
) -> None:
    """Add what one name of a row says to ``flags``, or why not to ``comments``."""
    key, _, wanted = name.partition("=")
    value, words = settings.get(key), use.split()
    if value is None or (wanted and str(value).lower() != wanted.lower()):
        return
    if name == "actor.kl_loss_coef" and not settings.get("actor.use_kl_loss"):
        comments[key] = "actor.use_kl_loss is off"
    elif use.startswith("--lora-") and (why := _why_not_lora(key, use, settings, flags)) is not None:
        comments[key] = why or None
    elif key.startswith("algorithm.norm_adv") and settings.get("algorithm.adv_estimator", "grpo") != "grpo":
        comments[key] = "it is of adv_estimator grpo alone"
    elif "${" in str(value):
        comments[key] = f"it refers to another setting; {use}"
    elif not use or use.startswith(("torchrun", "--langrl", "--wandb-project")) and (wanted or "wandb" not in use):
        comments[key] = f"use {use}" if use else "docs/coming_from.md says why there is none"
    elif key == "actor.use_kl_loss" or (len(words) > 1 and not wanted and value is False):
        comments[key] = None
    else:
        values = value if isinstance(value, list) else [value]
        texts = [json.dumps(each) if isinstance(each, Mapping) else str(VALUES.get(str(each), each)) for each in values]
        words = words if len(words) > 1 else [use, "X"]
        for flag, given in zip(words[::2], words[1::2], strict=True):
            known = next(each for each in all_flags() if flag.removeprefix("--") in each.spellings)
            try:
                found = [given.replace("X", text) for text in texts]
                value_of(known, True, found, from_file=True)
                flags[flag.removeprefix("--")], comments[key] = found[0] if len(found) == 1 else found, None
            except ValueError as error:
                comments[key] = f"{flag} {error}"


def _why_not_lora(key: str, use: str, settings: Mapping[str, Any], flags: Mapping[str, Any]) -> str | None:
    """Why a setting of adapters does nothing, "" where that needs no words; None where it is a flag of ours."""
    if key == "use_peft":
        return ""
    if key.startswith("lora_") and not settings.get("use_peft"):
        return f"use_peft is off; it is {use}"
    if use == "--lora-rank":
        return "" if settings[key] == 0 else None  # verl's word for no adapters
    if use == "--lora-dropout":
        return "" if settings[key] == 0 else f"{use} is for supervised training alone"
    return None if "lora-rank" in flags else f"{use} has no effect without a rank"
