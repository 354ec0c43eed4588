"""Every kind of extension by ``file.py:name`` and ``package.module:name``, from a user's current directory."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from megatron_rl.environments.__main__ import template_of
from tests.support.forks import REPOSITORY, run_python
from tests.support.runs import RL, TINY, command
from tests.support.tiny import write_tokenizer

KINDS = {
    "rl-policy-loss": "from megatron_rl.algorithms.losses.clip import Loss as Mine",
    "rl-advantage": "from megatron_rl.algorithms.advantages.grpo import Advantage as Mine",
    "rl-correction": "from megatron_rl.algorithms.corrections.token_tis import Correction as Mine",
    "rl-group-filter": "from megatron_rl.algorithms.filters.signal import Filter as Mine",
    "rl-rollout-quantization": "from megatron_rl.quantization.recipes.int8 import RECIPE as Mine",
    "environment": template_of("grade").substitute(name="mine", class_name="Mine").replace(" even? ", "*2="),
}
"""Flag -> a file that defines ``Mine``; the environment stands in a YAML list."""
FORMS = ("{kind}.py", "inside/{kind}.py", "{folder}/inside/{kind}.py", "{kind}", "inside.{kind}")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A user's folder: each kind in a file there, and in a package there."""
    (tmp_path / "inside").mkdir()
    for kind, source in KINDS.items():
        for folder in (tmp_path, tmp_path / "inside"):
            (folder / f"{kind.replace('-', '_')}.py").write_text(f"{source}\n")
    write_tokenizer(tmp_path / "tokenizer")
    return tmp_path


def _command(here: Path, *forms: str, **more: object) -> list[str]:
    turns = zip(KINDS, itertools.cycle(forms), strict=False)
    named = {kind: form.format(kind=kind.replace("-", "_"), folder=here) + ":Mine" for kind, form in turns}
    (here / "list.yaml").write_text(yaml.safe_dump([{"environment": named.pop("environment")}]))
    flags = {**TINY, **RL, "rl-dynamic-sampling": True, "rl-max-refills": 1, "tokenizer-model": "tokenizer"}
    return command({**flags, **named, "langrl-env-config": "list.yaml", "run-dir": "run", **more})


def _check(here: Path, *forms: str) -> subprocess.CompletedProcess[str]:
    words = [REPOSITORY / "train_rl.py", *_command(here, *forms), "--check"]
    return run_python(*words, cwd=here, env={**os.environ, "PYTHONPATH": ""})


@pytest.mark.parametrize("first", [0, 2, pytest.param(4, marks=pytest.mark.long)])
def test_all_kinds_are_found(here: Path, first: int):
    """Each kind in several of the forms."""
    checked = _check(here, *FORMS[first:], *FORMS[:first])
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("form", ["nowhere/{kind}.py", "nowhere.{kind}"])
def test_what_is_missing_is_one_line_each_that_names_it(here: Path, form: str):
    checked = _check(here, form)
    assert checked.returncode == 2
    # A busy machine takes its time, and then the log says what for.
    head, *lines = [line for line in checked.stderr.splitlines() if " INFO " not in line]
    assert head == f"{len(KINDS)} problem(s) in the configuration:"
    assert len(lines) == len(KINDS)
    for kind in KINDS:
        (line,) = [line for line in lines if form.format(kind=kind.replace("-", "_")) in line]
        assert "nowhere" in line.partition(":Mine")[2], "the reason names what is not there"


def test_they_do_their_work(here: Path):
    """In the rank, the environment server and its workers; the rewards come from the file."""
    words = [REPOSITORY / "train_rl.py", *_command(here, "inside/{kind}.py", **{"train-iters": 1})]
    finished = run_python(*words, cwd=here, env={**os.environ, "PYTHONPATH": ""})
    assert finished.returncode in (0, 3), finished.stderr  # random answers: there may be nothing to learn from
    assert (here / "run" / "metrics.jsonl").is_file()
    assert "inside/rl_policy_loss.py:Mine" in (here / "run" / "config.diff.yaml").read_text()
