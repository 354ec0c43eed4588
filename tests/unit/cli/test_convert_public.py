"""Public configurations of TRL, verl and Megatron-LM, converted: `check` accepts them, and no setting vanishes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_rl import cli
from megatron_rl.cli.convert import settings_of
from megatron_rl.config.arguments import read_config
from megatron_rl.run.preflight import extension_problems
from tests.support.tiny import write_tokenizer

PUBLIC = {path.stem: yaml.safe_load(path.read_text()) for path in Path(__file__).with_name("public").glob("*.yaml")}
CASES = [(tool, name) for tool, found in sorted(PUBLIC.items()) for name in found]
ELSEWHERE = ("load", "load-hf", "load-lora", "pretrained-checkpoint", "rl-critic-load-hf", "tokenizer-model", "run-dir",
             "langrl-env-config", "tensorboard-dir", "save", "chat-template-kwargs", "system-prompt")  # fmt: skip
"""Flags that name files and models of another machine, or suit their prompts alone."""
WHOLE = ("qwen_2p5_3b", "open_r1_code", "smollm2_sft", "grpo_7b_math")
"""Configurations that the whole command is called with, which opens the environment; with --long all of them."""
TO_ADD = {
    "lr": "1e-6", "train-iters": "100", "seq-length": "32768", "global-batch-size": "64",
    "grpo-prompts-per-step": "1024", "grpo-group-size": "8", "sequence-parallel": None,
}  # fmt: skip
"""What a comment of the converted file may ask for."""
SHAPE = ["--hidden-size", "4096", "--ffn-hidden-size", "8192", "--num-attention-heads", "64"]


def _written(case: dict[str, Any], path: Path) -> Path:
    """Write a configuration in the form that its users have."""
    settings = case.get("settings", {})
    form = case.get("as", "sh" if any("." in name for name in settings) else "yaml")
    if "words" in case:
        path = path.with_suffix(".sh")
        path.write_text(f'OPTIONS="{case["words"]}"\ntorchrun --nproc-per-node 8 train_rl.py $OPTIONS\n')
    elif form == "sh":
        texts = {name: str(value) for name, value in settings.items()}
        words = [f"{name}={text if '$' in text else shlex.quote(text)}" for name, text in texts.items()]
        path = path.with_suffix(".sh")
        before = case.get("before", "python3 -m verl.trainer.main_ppo ")
        path.write_text(f"set -x\n{before}" + " \\\n ".join(words) + " $@\n")
    elif form == "flags":
        values = {name: value if isinstance(value, list) else [value] for name, value in settings.items()}
        words = [f"--{name} {'' if value == [True] else shlex.join(map(str, value))}" for name, value in values.items()]
        path = path.with_suffix(".sh")
        path.write_text("accelerate launch --config_file zero3.yaml examples/scripts/x.py \\\n " + " \\\n ".join(words))
    elif form == "python":
        of_trainer = {"model", "reward_funcs", "train_dataset", "eval_dataset", "tools"} & settings.keys()
        words = ", ".join(f"{name}={value!r}" for name, value in settings.items() if name not in of_trainer)
        names = ", ".join(f"{name}={settings[name] if 'func' in name else repr(settings[name])}" for name in of_trainer)
        path = path.with_suffix(".py")
        path.write_text(f"from trl import *\nargs = GRPOConfig({words})\nGRPOTrainer(args=args, {names}).train()\n")
    else:
        nested: dict[str, Any] = {}
        for name, value in settings.items():
            *outer, last = name.split(".") if not name.startswith("--") else ["MODEL_ARGS", name]
            inner = nested
            for part in outer:
                inner = inner.setdefault(part, {})
            inner[last] = value
        path = path.with_suffix(".yaml")
        path.write_text(yaml.safe_dump(nested))
    return path


@pytest.mark.parametrize(("tool", "name"), CASES)
def test_check_accepts_it_and_no_setting_vanishes(
    tool: str, name: str, tmp_path: Path, with_long: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    case = PUBLIC[tool][name]
    path = _written(case, tmp_path / "theirs")
    code = cli.main(["convert", str(path)])
    written, said = capsys.readouterr()
    if "refused" in case:
        assert code == 2 and case["refused"] in said
        return
    assert code == 0, said
    named = set(re.findall(r"[^\s,:#]+", written))
    named |= {word.rpartition(".")[0] for word in named}  # nested settings of one name
    given = re.findall(r"--[a-z][\w-]*", case["words"]) if "words" in case else case["settings"]
    given = [re.sub("^(actor_rollout_ref[.]|--)", "", name) for name in (*given, *settings_of(str(path)))]
    assert {name for name in given if not {name, f"--{name}"} & named} == set()
    command = _command(written, case, tmp_path)
    if with_long or name in WHOLE:
        code = cli.main(["check", *command])
        assert code == 0, f"{capsys.readouterr().err}\n{written}"
        return
    world_size = int((re.findall(r"^check-world-size: (\d+)", written, re.MULTILINE) or [case.get("ranks", 1)])[0])
    config, problems = read_config(command, world_size)
    assert [*problems, *extension_problems(config)[1]] == [], written


def _command(written: str, case: dict[str, Any], tmp_path: Path) -> list[str]:
    """Our words for the converted file, with a model, tasks and a directory of this machine, and what it asks for."""
    kept = [line for line in written.splitlines() if line.partition(":")[0] not in ELSEWHERE]
    ours = tmp_path / "ours.yaml"
    ours.write_text("\n".join(kept))
    asked = re.findall(r"^# --(?:([a-z-]+) is missing|.* needs --([a-z-]+) in training)", written, re.MULTILINE)
    flags = [flag for pair in asked for flag in pair if flag in TO_ADD]
    more = [word for flag in flags for word in (f"--{flag}", TO_ADD[flag]) if word]
    shape = [] if re.search("^num-layers:", written, re.M) else ["--num-layers", str(case.get("layers", 8)), *SHAPE]
    if "expert-model-parallel-size" in written and shape:
        shape = [*shape, "--num-experts", "128", "--disable-bias-linear"]
    if re.search("^rl-rollout-quantization|^fp8-format", written, re.MULTILINE) and shape:
        shape = [*shape, "--disable-bias-linear"]
    places = {"tokenizer-model": write_tokenizer(tmp_path / "tokenizer"), "run-dir": tmp_path / "run"}
    own = [word for flag, where in places.items() for word in (f"--{flag}", str(where))]
    tasks = ["--langrl-env-config", "{environment: arithmetic}"]
    return ["--config", str(ours), *own, *tasks, *shape, *more]


def test_there_are_twelve_of_each() -> None:
    accepted = [tool for tool, name in CASES if "refused" not in PUBLIC[tool][name]]
    assert all(accepted.count(tool) >= 12 for tool in ("megatron", "trl", "verl"))
