"""`megatron_rl.train`, `evaluate` and `generate`: the commands' results, and errors one can catch."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

import megatron_rl
from megatron_rl import main
from megatron_rl.errors import ConfigError
from megatron_rl.run.preflight import preflight
from tests.support.ranks import REPOSITORY
from tests.support.runs import RL, TINY, rows_of, run


def _flags(workshop, name: str, **more) -> dict:
    flags = {**TINY, **RL, "tokenizer-model": workshop.tokenizer, "langrl-env-config": workshop.digits, **more}
    return {key.replace("-", "_"): value for key, value in flags.items()} | {"run_dir": workshop.run_dir(name)}


@pytest.mark.own_process
def test_a_run_of_a_mapping_is_that_of_the_command_and_its_model_answers(workshop, monkeypatch):
    run(workshop.rl("command")).check()
    handler, checks = signal.getsignal(signal.SIGINT), []
    monkeypatch.setattr(main, "preflight", lambda config: checks.append(config) or preflight(config))
    summary = megatron_rl.train(_flags(workshop, "called", rl_stop_strings=["z", "a b"]))
    assert len(checks) == 1, "environments with data sets are read for seconds each time"
    assert (summary.status, summary.steps, summary.run_dir) == ("finished", 4, workshop.run_dir("called"))
    assert summary.values["updates"] == summary.updates
    assert rows_of(summary.run_dir) == rows_of(workshop.run_dir("command"))
    assert signal.getsignal(signal.SIGINT) is handler

    evaluation = {"load": summary.run_dir / "checkpoints", "rl_prompts_per_eval": 2, "rl_samples_per_eval_prompt": 2}
    evaluated = megatron_rl.evaluate(_flags(workshop, "evaluated") | evaluation)
    assert evaluated.evaluation["after"].keys() >= {"pass@1", "greedy"}

    texts = megatron_rl.generate(summary.run_dir, ["1+2=", "3"], temperature=0, max_new_tokens=5)
    assert len(texts) == 2
    assert texts == megatron_rl.generate(summary.run_dir, ["1+2=", "3"], temperature=0, max_new_tokens=5)


def test_what_is_wrong_is_raised(workshop):
    with pytest.raises(ConfigError) as caught:
        megatron_rl.train({"learning_rate": 1e-6, "lr": -1})
    assert "--learning-rate is not a flag; use --lr" in caught.value.lines
    with pytest.raises(ConfigError, match="Environment list|environment list"):
        megatron_rl.train(_flags(workshop, "x") | {"langrl_env_config": "nowhere.yaml"})
    with pytest.raises(ConfigError, match="no config.json"):
        megatron_rl.generate(workshop.folder, ["a"])
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        megatron_rl.trian  # noqa: B018


def test_importing_the_package_imports_neither_torch_nor_the_command():
    program = "import sys, megatron_rl; sys.exit('torch' in sys.modules or 'megatron_rl.api' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=True)
