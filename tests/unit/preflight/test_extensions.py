"""A user's own extension is imported and called once before a run: whatever it does costs one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path

import pytest

from megatron_rl.algorithms.extension import advantage_of, correction_of, filter_of, loss_of
from megatron_rl.config.flags import Flag, flags_of
from megatron_rl.config.rl_config import RLConfig, all_flags
from megatron_rl.errors import ConfigError
from megatron_rl.main import main
from megatron_rl.registry import ADVANTAGES, CORRECTIONS, FILTERS, LOSSES, PARSERS, REASONING, RECIPES, Registry
from megatron_rl.run.preflight import extension_problems
from megatron_rl.run.preflight.trial import call_once

MINE = """
import torch
from dataclasses import dataclass
from megatron_rl.algorithms import CLIPPED, Extension, GroupFilter, log_ratio, option
from megatron_rl.algorithms.losses.gspo import Loss as Gspo
from megatron_rl.algorithms.advantages.batch_norm import Advantage as BatchNorm
from megatron_rl.quantization.recipes.int8 import RECIPE as INT8
from megatron_rl.environments.tool_calls.parsers.hermes import PARSER as HERMES

def kept(batch, values):
    return torch.where(batch.in_loss, values, 0.0)

def right(batch):
    return kept(batch, -batch.advantages * kept(batch, batch.current_logprobs)), {}
"""


def reference(registry: Registry, name: str) -> str:
    return name if name in registry.names() else f"mine.py:{name}"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def config_of(**values: object) -> RLConfig:
    return RLConfig().with_values(**{"perform_rl_step": True, "rl_correction": "none", **values})


def problem_of(here: Path, field: str, source: str) -> str:
    """Of ``X`` in a file with the lines ``source``; empty where there is none."""
    (here / "mine.py").write_text(f"{MINE}\n{source}\n")
    try:
        call_once(config_of(**{field: "mine.py:X"}), field)
    except ConfigError as error:
        (line,) = error.lines
        assert line.startswith(f"--{field.replace('_', '-')}") and "mine.py:X" in line
        assert "\n" not in line and len(line) < 800
        return line
    return ""


LOSSES_AND_LINES = {
    "X = right": "",
    "X = 5": "is 5; name a function, or a subclass of megatron_rl.algorithms.Extension",
    "from os import system as X": "raises TypeError",
    "class X: __call__ = right": "name a function, or a subclass of megatron_rl.algorithms.Extension",
    "X = lambda batch: (right(batch)[0].sum(), {})": "returned a tensor of shape [] and torch.float32 as the loss",
    "X = lambda batch: right(batch)[0]": "returned a tensor of shape [4] and torch.float32, which is no pair",
    "X = lambda batch: (right(batch)[0][:3], {})": "returned a tensor of shape [3]",
    "X = lambda batch: (right(batch)[0][None], {})": "returned a tensor of shape [1, 4]",
    "X = lambda batch: None": "returned None, which is no pair",
    "X = lambda batch: (None, {})": "returned None as the loss of four tokens",
    "X = lambda batch: (right(batch)[0].tolist(), {})": "returned a list as the loss of four tokens",
    "X = lambda batch: (right(batch)[0].detach(), {})": "returned a loss without a gradient of batch.current_logprobs",
    "X = lambda batch: (right(batch)[0] * 0, {})": "returned a loss without a gradient",
    "X = lambda batch: (right(batch)[0] / 0, {})": "return finite numbers where",
    "X = lambda batch: (-batch.advantages * batch.current_logprobs, {})": "returned the loss [nan, 1.0",
    "X = lambda batch: (kept(batch, batch.current_logprobs.exp() * 2), {})": "returned the gradient [nan, 0.7",
    "X = lambda batch: (right(batch)[0], None)": "returned None as metrics",
    "X = lambda batch: (right(batch)[0], {'a': 1.0})": "returned a float as metrics a; return a dict of tensors",
    "X = lambda batch: (right(batch)[0], {'a': torch.ones(2)})": "a tensor of shape [2] and torch.float32 as metr",
    "def X(batch):\n    return 1 / 0, {}": "raises ZeroDivisionError: division by zero (mine.py:",
}


@pytest.mark.parametrize("source", LOSSES_AND_LINES)
def test_a_loss_that_returns_something_else_is_refused(here: Path, source: str) -> None:
    told = LOSSES_AND_LINES[source]
    line = problem_of(here, "rl_policy_loss", source)
    assert told in line and bool(told) == bool(line)


@pytest.mark.parametrize(
    ("field", "source", "told"),
    [
        ("rl_advantage", "X = lambda batch: (batch.of_samples(batch.step.rewards), {})", ""),
        ("rl_advantage", "X = lambda batch: (batch.step.rewards, {})", "returned a tensor of shape [2]"),
        ("rl_advantage", "X = lambda batch: batch.rewards", "may be empty: `return batch.of_samples(advantages), {}`"),
        ("rl_correction", "X = lambda batch: (batch.loss_mask, {CLIPPED: ~batch.in_loss})", ""),
        ("rl_correction", "X = lambda batch: (batch.loss_mask, {CLIPPED: batch.loss_mask})", "cut, [T] bool"),
        ("rl_correction", "X = lambda batch: (torch.ones(4), {})", "returned the weight [1.0, 1.0, 1.0, 1.0]"),
        ("rl_correction", "X = lambda batch: (batch.in_loss, {})", "of shape [4] and torch.bool as the weight"),
        ("rl_group_filter", "X = lambda rewards: bool((rewards > 0).any())", ""),
        ("rl_group_filter", "X = lambda rewards: rewards.sum() > 0.1", ""),
        ("rl_group_filter", "X = lambda rewards: None", "returned None for the rewards [1.0, 0.0]; return True"),
        ("rl_group_filter", "X = lambda rewards: bool(rewards.max() > 0)", "raises RuntimeError"),
        ("rl_rollout_quantization", "X = INT8", ""),
        ("rl_rollout_quantization", "X = type(INT8)", "name an instance of a subclass of megatron_rl.q"),
        ("rl_rollout_quantization", "X = 5", "is 5; name an instance"),
        (
            "rl_rollout_quantization",
            "class Bad(type(INT8)):\n    def matmul(self, x, q): return x\nX = Bad()",
            "a tensor of shape [4, 256] and torch.float32 from matmul; return finite numbers of shape [4, 128]",
        ),
        ("rl_reasoning_parser", "from megatron_rl.endpoint.reasoning.think import PARSER as X", ""),
        ("rl_reasoning_parser", "X = 5", "name an instance of megatron_rl.endpoint.reasoning.Reasoning"),
        ("rl_tool_call_parser", "X = HERMES", ""),
        ("rl_tool_call_parser", "X = type(HERMES)", "name an instance of a subclass of"),
        (
            "rl_tool_call_parser",
            "class Bad(type(HERMES)):\n    def read(self, text, schemas): return [text]\nX = Bad()",
            "from which it reads []",
        ),
        (
            "rl_tool_call_parser",
            "class Bad(type(HERMES)):\n    def read(self, text, schemas): return None\nX = Bad()",
            "raises TypeError: 'NoneType' object is not iterable",
        ),
    ],
)
def test_other_kinds_are_called_too(here: Path, field: str, source: str, told: str) -> None:
    line = problem_of(here, field, source)
    assert told in line and bool(told) == bool(line)


@pytest.mark.parametrize(
    ("field", "source", "told"),
    [
        ("rl_policy_loss", "class X(Gspo): pass", "inherits AGGREGATION = 'sequence-mean'; write AGGREG"),
        ("rl_policy_loss", "class X(Gspo): AGGREGATION = 'sequence-mean'", ""),
        ("rl_policy_loss", "class X(Gspo): AGGREGATION = 'mean'", "has AGGREGATION = 'mean'; use one of token-mean"),
        ("rl_advantage", "class X(BatchNorm): pass", "inherits BASELINE = 'batch'"),
        ("rl_advantage", "class X(BatchNorm): BASELINE = 'step'", "has BASELINE = 'step'; use one of group, batch"),
    ],
)
def test_constants_are_those_that_the_run_reads(here: Path, field: str, source: str, told: str) -> None:
    """A subclass of `gspo` was trained with another denominator than its own."""
    line = problem_of(here, field, source)
    assert told in line and bool(told) == bool(line)


@pytest.mark.parametrize(
    ("field", "registry"),
    [
        ("rl_advantage", ADVANTAGES), ("rl_policy_loss", LOSSES), ("rl_correction", CORRECTIONS),
        ("rl_group_filter", FILTERS), ("rl_rollout_quantization", RECIPES), ("rl_tool_call_parser", PARSERS),
        ("rl_reasoning_parser", REASONING),
    ],
)  # fmt: skip
def test_all_of_the_library_pass(field: str, registry: Registry) -> None:
    for name in registry.names():
        if name != "none" or registry is not RECIPES:
            call_once(config_of(**{field: name}), field)


NUMBERS = (-1.0, -0.5, 0.0, 1e-7, 1e-3, 0.3, 0.5, 0.9, 1.0, 1.5, 2.0, 3.0, 100.0)
TEXTS = ("reward", "reward+format", "2", "1+0.5")


def values_of(option: Flag) -> list[str]:
    """Values that the option takes on its own; of a number those at its bounds, too."""
    if option.kind is bool:
        return ["true", "false"]
    if option.choices or option.kind is str:
        return list(map(str, option.choices or TEXTS))
    numbers = {*NUMBERS, *(bound for bound in (option.ge, option.le, option.default) if bound is not None)}
    numbers = {option.kind(number) for number in numbers if option.kind(number) == number}
    return [repr(number) for number in sorted(numbers) if option.refusal(number) is None]


@pytest.mark.parametrize(
    ("field", "choose"),
    {
        "rl_advantage": advantage_of, "rl_policy_loss": loss_of, "rl_correction": correction_of,
        "rl_group_filter": filter_of,
    }.items(),
)  # fmt: skip
def test_every_option_of_the_library_passes(field: str, choose: Callable[[RLConfig], object]) -> None:
    """`bootstrap_truncated=true` of ``gae`` was refused, and `lowest=1` of ``maxrl``: the trial's batch was wrong."""
    registry = next(flag.names_of for flag in all_flags() if flag.name == field)
    for name in registry.names():
        extension = registry.get(name)
        options = flags_of(extension) if isinstance(extension, type) else ()
        texts = [[f"{option.name}={value}" for value in values_of(option)] for option in options]
        pairs = [pair for one, other in combinations(texts, 2) for pair in product(one[::3], other[::3])]
        passed: set[str] = set()
        for case in [(text,) for own in texts for text in own] + pairs:
            config = config_of(**{field: name, f"{field}_args": case})
            try:
                choose(config)
            except ConfigError:
                continue  # values that exclude each other
            call_once(config, field)
            passed.update(case)
        assert all(len(passed.intersection(own)) > 1 for own in texts), f"{name}: {passed} of {texts}"


WILD = {
    "rl_advantage": ("raise SystemExit(3)", "SystemExit: 3"),
    "rl_policy_loss": ("import os; os._exit(0)", "ended the process with status 0 while rl_policy_loss.py:X was imp"),
    "rl_correction": ("import time; time.sleep(600)", "took more than 4 s while rl_correction.py:X was imported"),
    "rl_group_filter": (
        "import os\ndef X(rewards): os.kill(os.getpid(), 9)",
        "was killed by SIGKILL, likely for want of memory, while it was called on four tokens",
    ),
    "rl_rollout_quantization": ("X = 5", "is 5; name an instance"),
    "rl_tool_call_parser": ("def X(", "SyntaxError"),
    "rl_reasoning_parser": ("raise ValueError('no')", "ValueError: no"),
}


def test_whatever_a_file_does_costs_a_line(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And none of these files is imported into this process."""
    for field, (source, _) in WILD.items():
        (here / f"{field}.py").write_text(source)
    named = {field: f"{field}.py:X" for field in WILD}
    sound, problems = extension_problems(config_of(**named, rl_environment_load_timeout=4.0))
    assert sound == config_of(rl_environment_load_timeout=4.0)
    assert len(problems) == len(WILD)
    for field, (_, told) in WILD.items():
        (line,) = [str(problem) for problem in problems if f"{field}.py:X" in str(problem)]
        assert line.startswith(f"--{field.replace('_', '-')}") and told in line and "\n" not in line
    assert capfd.readouterr() == ("", "")


def test_check_ends_with_2_and_a_run_calls_the_users_own_loss(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`check` printed nothing and ended with 0 where a module had called ``os._exit(0)``."""
    (here / "ending").mkdir()
    (here / "ending" / "__init__.py").write_text("import os; os._exit(0)")  # run by whoever looks for ending.mine
    (here / "ending" / "mine.py").write_text(MINE)
    assert main(["train_rl.py", "--perform-rl-step", "--rl-policy-loss", "ending.mine:right", "--check"]) == 2
    told = capfd.readouterr().err
    (line,) = [line for line in told.splitlines() if "ending.mine:right" in line]
    assert "ended the process with status 0 while ending.mine:right was imported" in line
    (here / "mine.py").write_text(MINE)
    assert loss_of(config_of(rl_policy_loss="mine.py:right")).__name__ == "right", "nothing is between it and a step"
