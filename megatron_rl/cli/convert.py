"""megatron-rl convert FILE > run.yaml: write a configuration of TRL, verl, SkyRL, NeMo-RL or Megatron-LM as ours.

FILE is a YAML file of theirs, a Python file that calls GRPOConfig(...) or SFTConfig(...), or a shell script with flags
(--learning_rate 1e-6) or overrides (data.train_batch_size=64); Python and scripts are parsed and never run. Each
setting becomes a flag that `megatron-rl check` accepts, or a comment that says why. docs/coming_from.md has the table.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config.arguments import FOREIGN_FLAGS, Reading, foreign_flags, table, value_of
from megatron_rl.config.model_directory import read_adapter_directory, read_model_directory
from megatron_rl.config.no_effect import no_effect
from megatron_rl.config.rl_config import RLConfig, all_spellings, resolve
from megatron_rl.config.rules import validate
from megatron_rl.errors import ConfigError, Problem, one_line
from megatron_rl.main import refuse
from megatron_rl.run.preflight import extension_problems
from megatron_rl.run.preflight.machine import recipe_problems
from megatron_rl.user_files import read_text

OPERATIONS = {" × ": math.prod, " + ": sum, " / ": lambda pair: pair[0] // pair[1]}
VALUES = {"low_var_kl": "k3", "mse": "k2", "kl": "k1", "seq-mean-token-mean": "sequence-mean", "vanilla": "clip",
          "constant_with_warmup": "constant", "cosine_with_min_lr": "cosine", "all-linear": "all", "regular": "clip",
          "adamw_torch": "adam", "adamw_torch_fused": "adam", "adamw": "adam", "dual_clip": "clip",
          "reinforce++": "reinforce_plus_plus", "token_mean": "token-mean", "sequence_mean": "sequence-mean",
          "seq_mean_token_sum_norm": "constant"}  # fmt: skip
VARIABLE = r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)"
"""A variable of a shell script: ``${NAME}``, ``${NAME:-default}`` or ``$NAME``."""
SUM = r"\$\(\((.*?)\)\)(?!\))"
"""Arithmetic of a shell script: ``$((1024 * 2))``."""
ABOVE_0 = r"(?![0.]*$)\d+\.?\d*(e[+-]?\d+)?"
ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv}
OF_MEGATRON = re.compile(r"(?:--|.*\.(?:override_(?:transformer|optimizer)_config|megatron_cfg)\.)([\w-]+)")
"""Flags of Megatron-LM, and what verl and NeMo-RL hand to it: those that are flags of ours need no row."""
FLAG = r"--[a-z][a-z0-9-]*"
FLAGS = {text: flag for text, (flag, _) in all_spellings().items()}
NONE = "there is no setting here"
CALLS = {"GRPOConfig": "", "SFTConfig": "", "GRPOTrainer": "", "SFTTrainer": "", "LoraConfig": "peft_config."}
"""Calls that are read of a Python file, and what is put before their keywords."""
OTHER_METHODS = re.compile(r"(DPO|KTO|ORPO|CPO|BCO|PRM|Reward|XPO|NashMD|OnlineDPO|GKD|PPO|RLOO)(Config|Trainer)")
SUPERVISED = {"max_length", "max_seq_length", "packing", "assistant_only_loss", "completion_only_loss"}
"""Settings of TRL's `SFTConfig` that `GRPOConfig` has not; those of preference methods have ``beta`` besides."""
FROM_DISK = ("hf_config", "load", "load_hf", "load_lora", "pretrained_checkpoint")
"""Flags that are checked with what they name only where that is a directory: no name on the hub is looked up."""
Row = tuple[str, str, str]
"""Of a setting: its value (a pattern, empty for any), ours, and a note."""


@dataclass
class Line:
    """What a flag of ours says, and the settings that say so."""

    texts: list[str]
    sources: list[str]


def main(words: Sequence[str]) -> int:
    """Return 0, or 2 with one line that says why the file cannot be read."""
    if len(words) != 1 or words[0].startswith("-"):
        sys.stdout.write(f"usage: megatron-rl convert FILE\n\n{__doc__}")
        return 0 if words and words[0] in ("-h", "--help") else 2
    try:
        lines = [*converted(settings_of(words[0]))]
    except (ValueError, SyntaxError, yaml.YAMLError, RecursionError) as error:
        return refuse(ConfigError([f"{words[0]} cannot be converted: {one_line(str(error))}"]).problems)
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 0


def settings_of(path: str) -> dict[str, Any]:
    """Return dotted key -> value, without verl's ``actor_rollout_ref.``; ``ValueError`` where there is none."""
    text = read_text(path)
    if path.endswith(".py"):
        found = dict(_keywords(ast.parse(text)))
    elif path.endswith(".sh"):
        joined = re.sub(SUM, lambda found: re.sub(r"\s", "", found[0]), text.replace("\\\n", " "))
        found = dict(_overrides(shlex.split(joined, comments=True), {}))
    else:
        found = yaml.safe_load(text)
    if not isinstance(found, Mapping) or not found:
        raise ValueError(
            "it has no settings; give a YAML file, a Python file with GRPOConfig(...), or a script with flags"
        )
    flat = dict(_flat(found, ""))
    for key, value in flat.items():
        name = re.fullmatch(r"\$\{([\w.]+)\}", str(value))
        flat[key] = flat.get(name[1], value) if name else value
    return {re.sub(r"^(actor_rollout_ref\.|.*\.(?=--))", "", key): value for key, value in flat.items()}


def _overrides(words: Sequence[str], variables: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield what a shell script says as ``dotted.name=value`` or ``--name value``, with its own variables put in."""
    flag, texts = "", []
    for raw in (*words, "--"):
        word = re.sub(SUM, lambda found: _sum(found, variables), _filled(raw, variables))
        name, sign, text = word.lstrip("+").partition("=")
        is_variable = sign and re.fullmatch(r"[A-Za-z_]\w*", name)
        is_override = sign and re.fullmatch(r"[a-z_]\w*(\.\w+)+", name)
        if not (word.startswith("--") or is_variable or is_override or word.endswith(".py") or word == "-m"):
            texts.append(word.rstrip(","))
            continue
        if flag:
            yield flag, True if not texts else _value(texts[0]) if len(texts) == 1 else texts
        flag, texts = name if re.fullmatch(r"--[A-Za-z][\w-]*", name) else "", [text] if sign else []
        flag = flag[2:] if "_" in flag or flag[2:] in foreign_flags() else flag  # TRL's, else Megatron-LM's
        if is_override:
            yield name, _value(text)
        elif is_variable:
            variables[name] = text
            if re.search(r"(^|\s)(--\w|\+?[a-z_]\w*\.[\w.]+=)", text):
                yield from _overrides(shlex.split(text), variables)


def _filled(word: str, variables: Mapping[str, str]) -> str:
    """Put variables in, inner ones first; one of elsewhere stays, as ``$NAME``."""
    names = re.compile(VARIABLE)
    new = names.sub(lambda found: variables.get(found[1] or found[3], found[2] or f"${found[1] or found[3]}"), word)
    return word if new == word else _filled(new, variables)


def _value(text: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _sum(found: re.Match[str], variables: Mapping[str, str]) -> str:
    """Work out ``$((a * 2))``; it stays as it stands where a variable is of elsewhere."""

    def number(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return ARITHMETIC[type(node.op)](number(node.left), number(node.right))
        return int(variables.get(ast.unparse(node), ast.unparse(node)))

    try:
        return str(number(ast.parse(found[1], mode="eval").body))
    except (KeyError, ValueError, SyntaxError, ZeroDivisionError):
        return found[0]


def _keywords(tree: ast.Module) -> Iterator[tuple[str, object]]:
    """Yield what the calls in ``CALLS`` are given; what is computed begins with $, as a variable of a script."""
    for node in ast.walk(tree):
        name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        if OTHER_METHODS.fullmatch(name):
            raise ValueError(f"it calls {name}; only GRPOConfig and SFTConfig have a counterpart here")
        if name in CALLS:
            words = [*zip(("model", "reward_funcs"), node.args, strict=False)]
            for word, value in [*words, *((word.arg or "**", word.value) for word in node.keywords)]:
                try:
                    yield CALLS[name] + word, ast.literal_eval(value)
                except ValueError:
                    yield CALLS[name] + word, f"${ast.unparse(value)}"


def _flat(values: Mapping[Any, Any], before: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        nested = isinstance(value, Mapping) and value and name != "chat_template_kwargs"
        yield from _flat(value, f"{before}{name}.") if nested else [(f"{before}{name}", value)]


def converted(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of our file: a flag each, with the settings that it comes from, then comments."""
    conversion = Conversion(settings)
    missing = conversion.checked()
    is_plain = re.compile(r"[\w./+-]+").fullmatch
    for name, line in conversion.lines.items():
        value = line.texts[0] if len(line.texts) == 1 else line.texts
        text = value if isinstance(value, str) and is_plain(value) else json.dumps(value)
        yield f"{name}: {text}" + (f"  # {', '.join(line.sources)}" if line.sources else "")
    told = {name: why for name in settings if (why := conversion.comments.get(name))}
    yield from (f"# {name}: {one_line(str(settings[name]), 60)}  ({why})" for name, why in told.items())
    yield from (f"# {problem.text}" for problem in missing)


class Conversion:
    """Flags of ours, and the reasons why other settings are none."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        is_supervised = bool(SUPERVISED & settings.keys()) and not {"num_generations", "reward_funcs"} & settings.keys()
        if is_supervised and "beta" in settings:
            raise ValueError("max_length beside beta is of DPO or another preference method; none is trained here")
        self.settings, self.comments = settings, dict.fromkeys(settings, NONE)
        self.lines = {} if is_supervised else {"perform-rl-step": Line(["true"], [])}
        rows: dict[str, list[Row]] = {}
        parts: dict[str, list[Row]] = {}
        for names, sign, ours, note in [*table(files("megatron_rl.cli") / "convert.txt"), *table(FOREIGN_FLAGS)]:
            numbers = [float(text) for name in names if re.fullmatch(ABOVE_0, text := str(settings.get(name)))]
            if sign == ", ":
                for name, use in zip(names, ours, strict=True):
                    rows.setdefault(name.partition("=")[0], []).append((name.partition("=")[2], use, note))
            elif len(numbers) < len(names):
                parts |= {name: [("", "", f"{ours[0]} is {sign.join(names)}")] for name in names}
            elif why := self._written(ours[0], [f"{OPERATIONS[sign](numbers):.15g}"], names):
                parts |= {name: [("", "", why)] for name in names}
        rows = {name: row for name, row in parts.items() if self.comments.get(name)} | rows
        order = {name: number for number, name in enumerate(rows)}
        off = tuple(name[: -len("enabled")] for name, on in settings.items() if name.endswith(".enabled") and not on)
        for name, value in sorted(settings.items(), key=lambda setting: order.get(setting[0], len(order))):
            row = _row(name, value, rows)
            if value is None or (off and name.startswith(off)):
                self.comments[name] = "unset" if value is None else "its section is off"
            elif row is not None:
                self.comments[name] = self._translated(name, *row)

    def _translated(self, name: str, wanted: str, use: str, note: str) -> str:
        """Write lines for a setting by its row of the table; else return the reason why there are none."""
        value = self.settings[name]
        if condition := re.fullmatch(r"if ([\w.]+)=(\w+)( by default)?", note):
            other, needed, by_default = condition.groups()
            asked = self.settings.get(other, needed if by_default else None)
            if needed not in map(str, asked if isinstance(asked, list) else [asked]):
                return f"only with {other}={needed}"
        if not use:
            return note or "docs/coming_from.md says why there is none"
        if "$" in str(value):
            return f"it refers to another setting; use {use}"
        if use.startswith(("torchrun", "--langrl")) or (use == "--wandb-project" and wanted):
            return f"use {use}"
        values = value if isinstance(value, list) else [value]
        texts = [json.dumps(each) if isinstance(each, Mapping) else str(VALUES.get(str(each), each)) for each in values]
        words = use.split() if " " in use else [use, "true" if wanted else "X"]
        if value is False and "X" not in words and not wanted:
            return "off by default"
        for flag, given in zip(words[::2], words[1::2], strict=True):
            found = [given.replace("X", text) for text in texts] if "X" in given else [given]
            if why := self._written(flag, found, [name]):
                return why
        return ""

    def _written(self, flag: str, texts: list[str], sources: list[str]) -> str:
        """Add a line, or say why not.

        Of two that differ the later one holds, but verl's corrections by weights and by rejection join.
        """
        name = flag.removeprefix("--")
        try:
            if _value_of(name, texts) is FLAGS[name].default is False:
                return "off by default"
        except ValueError as error:
            return f"{flag} {error}"
        if FLAGS[name].names_of and any(":" in text for text in texts):  # checking it would run it
            return f"it names code; use {flag}"
        old = self.lines.pop(name, Line(texts, []))
        if name == "rl-correction" and ".rollout_" in sources[0] and old.sources:
            texts = [f"{old.texts[0]}+{texts[0]}"]
        elif old.texts != texts:
            self.comments |= dict.fromkeys(old.sources, f"{', '.join(sources)} sets {flag}")
            old.sources = []
        self.lines[name] = Line(texts, [*old.sources, *sources])
        self.comments |= dict.fromkeys(sources, "")
        return ""

    def checked(self) -> list[Problem]:
        """Turn lines that `megatron-rl check` refuses into comments; return what it misses besides."""
        while True:
            config, problems = self._problems()
            blamed = [(str(each.flag), each) for each in problems]
            if config.training.perform_rl_step and not any(self._line_of(flag) for flag, _ in blamed):
                of_names = [*extension_problems(config)[1], *recipe_problems(config)]
                blamed = [(flag, each) for each in of_names for flag in re.findall(FLAG, each.text)[::-1]]
            refused = [(line, each) for flag, each in blamed if (line := self._line_of(flag))]
            if not refused:
                return problems
            line, problem = refused[0]
            self.comments |= dict.fromkeys(self.lines.pop(line).sources, problem.text)

    def _line_of(self, spelling: str) -> str | None:
        flag = FLAGS.get(spelling.removeprefix("--"))
        return next((name for name in self.lines if FLAGS[name] is flag), None)

    def _problems(self) -> tuple[RLConfig, list[Problem]]:
        reading = Reading()
        for name, line in self.lines.items():
            if FLAGS[name].name not in FROM_DISK or Path(line.texts[0]).is_dir():
                reading.take(FLAGS[name], _value_of(name, line.texts))
        reading.finish()
        read_model_directory(reading)
        read_adapter_directory(reading)
        ranks = reading.values.get("expert_model_parallel_size", 1)
        if ranks > 1 and not reading.config.model.num_experts:
            reading.derived |= {"num_experts": 2 * ranks, "add_bias_linear": False}  # as the model is not here
        config = resolve(reading.config, 1)
        size = math.lcm(config.model_parallel_size, config.expert_parallel_ranks)
        if config.training.check_world_size is None and size > 1:
            self.lines["check-world-size"] = Line([str(size)], [])
        problems = [*reading.problems, *validate(config, config.training.check_world_size or size)]
        return config, [each for each in problems if each.flag != "--num-layers" or "load-hf" not in self.lines]


def _row(name: str, value: object, rows: Mapping[str, list[Row]]) -> Row | None:
    """Find the row of a setting: of its name before a pattern, and of its value before any value."""
    found = rows.get(name, [])
    if not found and (own := OF_MEGATRON.fullmatch(name)) and (flag := own[1].replace("_", "-")) in FLAGS:
        found = [("", f"--{flag}", "")]
    elif not found and own and flag in no_effect():
        found = [("", "", no_effect()[flag].why)]
    found = found or [row for key, each in rows.items() if "*" in key and fnmatchcase(name, key) for row in each]
    texts = [str(each).lower() for each in (value if isinstance(value, list) else [value])]
    fits = [row for row in found if any(fnmatchcase(text, row[0].lower() or "*") for text in texts)]
    return min(fits, key=lambda row: not row[0], default=("", "", f"{NONE} for this value") if found else None)


def _value_of(spelling: str, texts: Sequence[str]) -> object:
    """Return the value of a flag; ``ValueError`` says what is wrong with ``texts``."""
    return value_of(FLAGS[spelling], FLAGS[spelling].spellings[spelling], texts, from_file=True)
