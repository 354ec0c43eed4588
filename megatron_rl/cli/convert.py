"""megatron-rl convert FILE > run.yaml: write a configuration of TRL, verl, SkyRL or NeMo-RL as ours.

FILE is a YAML file of theirs, a Python file that calls GRPOConfig(...) or LoraConfig(...), or a shell script that gives
settings as overrides (data.train_batch_size=64); Python and scripts are parsed and never run. What has no counterpart
becomes a comment with the reason. The table is that of docs/coming_from.md.
"""

from __future__ import annotations

import ast
import json
import math
import re
import shlex
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
          "adamw_torch": "adam", "constant_with_warmup": "constant", "all-linear": "all", "regular": "clip",
          "dual_clip": "clip", "reinforce++": "reinforce_plus_plus", "token_mean": "token-mean",
          "sequence_mean": "sequence-mean", "seq_mean_token_sum_norm": "constant"}  # fmt: skip
ONLY_WITH: dict[str, tuple[str, object]] = {
    "actor.kl_loss_coef": ("actor.use_kl_loss", True),
    "algorithm.norm_adv_by_std_in_grpo": ("algorithm.adv_estimator", "grpo"),
    "trainer.algorithm.kl_loss_coef": ("trainer.algorithm.use_kl_loss", True),
    "trainer.algorithm.clip_ratio_c": ("trainer.algorithm.policy_loss_type", "dual_clip"),
    "trainer.algorithm.grpo_norm_by_std": ("trainer.algorithm.advantage_estimator", "grpo"),
    "trainer.algorithm.tis_imp_ratio_cap": ("trainer.algorithm.use_tis", True),
    "trainer.algorithm.value_clip": ("trainer.algorithm.advantage_estimator", "gae"),
    "trainer.critic.optimizer_config.lr": ("trainer.algorithm.advantage_estimator", "gae"),
}
"""Settings that act where another one has this value."""
DEFAULTS = {"algorithm.adv_estimator": "grpo", "trainer.algorithm.advantage_estimator": "grpo",
            "trainer.algorithm.use_kl_loss": True}  # fmt: skip
"""Defaults of theirs, of settings in ``ONLY_WITH``."""
VARIABLE = r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)"
"""A variable of a shell script: ``${NAME}``, ``${NAME:-default}`` or ``$NAME``."""
NONE = "there is no setting here"
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
    elif path.endswith(".sh"):
        found = dict(_overrides(text))
    else:
        found = yaml.safe_load(text)
    if not isinstance(found, Mapping) or not found:
        raise ValueError(
            "it has no settings; give a YAML file, a Python file with GRPOConfig(...), or a script with overrides"
        )
    flat = dict(_flat(found, ""))
    for key, value in flat.items():
        name = re.fullmatch(r"\$\{([\w.]+)\}", str(value))
        flat[key] = flat.get(name[1], value) if name else value
    return {key.removeprefix("actor_rollout_ref."): value for key, value in flat.items()}


def _overrides(script: str) -> Iterator[tuple[str, Any]]:
    """Yield the settings that a shell script gives as ``dotted.name=value``, with the script's own variables put in."""
    variables: dict[str, str] = {}
    for word in shlex.split(script.replace("\\\n", " "), comments=True):
        name, sign, text = word.lstrip("+").partition("=")
        text = re.sub(VARIABLE, lambda found: variables.get(found[1] or found[3], found[2] or found[0]), text)
        if sign and re.fullmatch(r"[A-Za-z_]\w*", name):
            variables[name] = text
        elif sign and re.fullmatch(r"[a-z_]\w*(\.\w+)+", name):
            yield name, yaml.safe_load(text)


def _literal(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)  # computed: it fits no flag that wants a number, and is shown as it stands


def _flat(values: Mapping[Any, Any], before: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        nested = isinstance(value, Mapping) and name != "chat_template_kwargs"
        if nested and value.get("enabled") is False:
            value = {"enabled": False}  # nothing else of a section that is off has an effect
        yield from _flat(value, f"{before}{name}.") if nested else [(f"{before}{name}", value)]


def converted(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of our file: a flag each, then comments."""
    flags: dict[str, str | list[str]] = {"perform-rl-step": "true"}
    comments: dict[str, str | None] = dict.fromkeys(settings, NONE)
    switches = {name: on for name, on in settings.items() if name.endswith(".enabled")}
    comments |= {name: None if on else "its section is off" for name, on in switches.items()}
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
    if value is not None and wanted and str(value).lower() != wanted.lower() and comments[key] == NONE:
        comments[key] = f"{NONE} for this value"
    if value is None or (wanted and str(value).lower() != wanted.lower()):
        return
    other, needed = ONLY_WITH.get(key, ("", None))
    if other and settings.get(other, DEFAULTS.get(other)) != needed:
        comments[key] = f"{other} is off" if needed is True else f"it is of {other.rpartition('.')[2]} {needed} alone"
    elif use.startswith("--lora-") and (why := _why_not_lora(key, use, settings, flags)) is not None:
        comments[key] = why or None
    elif "$" in str(value):
        comments[key] = f"it refers to another setting; {use}"
    elif not use or use.startswith(("torchrun", "--langrl", "--wandb-project")) and (wanted or "wandb" not in use):
        comments[key] = f"use {use}" if use else "docs/coming_from.md says why there is none"
    elif key.endswith(".use_kl_loss") or (len(words) > 1 and not wanted and value is False):
        comments[key] = None
    else:
        values = value if isinstance(value, list) else [value]
        texts = [json.dumps(each) if isinstance(each, Mapping) else str(VALUES.get(str(each), each)) for each in values]
        words = words if len(words) > 1 else [use, "true" if wanted else "X"]
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
