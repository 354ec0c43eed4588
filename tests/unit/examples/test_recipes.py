"""Every recipe: its command is valid for its real number of ranks, and so is its rehearsal for two."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
from pathlib import Path

import pytest

from megatron_rl.config.arguments import read_config
from megatron_rl.config.rl_config import RLConfig
from megatron_rl.environments.config import load_environment_specs
from megatron_rl.run.memory.estimate import estimate, size_problems
from megatron_rl.run.preflight.machine import recipe_problems
from tests.support.recipes import EXAMPLES, SCRIPTS, family, launched, promised
from tests.unit.families.test_published_models import PUBLISHED

REHEARSAL = runpy.run_path(str(EXAMPLES / "rehearsal" / "prepare.py"))


def _name(script: Path) -> str:
    return f"{script.parent.name}/{script.stem}"


@pytest.fixture(params=SCRIPTS, ids=_name)
def script(request: pytest.FixtureRequest) -> Path:
    return request.param


def _published(folder: Path, name: str) -> Path:
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name][0]))
    return folder


def _config(script: Path, folder: Path) -> RLConfig:
    model = str(_published(folder, promised(script)["model"]))
    launch = launched(script, MODEL=model, CHECKPOINT=model)
    config, problems = read_config([*launch.flags, "--tokenizer-model", "unused"], launch.ranks)
    assert [*problems, *recipe_problems(config), *size_problems(config, launch.ranks)] == []
    return config


def test_the_command_is_valid_on_its_ranks(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    config = _config(script, tmp_path)
    assert config.training.perform_rl_step
    assert load_environment_specs(config.environment.langrl_env_config)


def test_the_memory_is_what_the_readme_says(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    row = promised(script)
    config = _config(script, tmp_path)
    assert int(row["ranks"]) == launched(script).ranks
    found = estimate(config, int(row["ranks"]), PUBLISHED[row["model"]][0]["vocab_size"])
    assert (row["rollouts"], row["updates"]) == (_gib(found.rollout), _gib(found.training - found.for_rollouts))
    assert max(found.rollout, found.training - found.for_rollouts) < 75 * 2**30, "of the 80 GB of an H100 or A100"


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f}"


def test_the_rehearsal_is_valid_on_two_ranks(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags that the script gives with a tiny model; launch.sh does the same."""
    monkeypatch.chdir(EXAMPLES.parent)
    model = tmp_path / "model"
    REHEARSAL["write_model"](family(script), model)
    flags = launched(script, MODEL=str(model), CHECKPOINT=str(model), NNODES="1", GPUS_PER_NODE="2").flags
    words = REHEARSAL["changed_flags"](tmp_path, [*flags, "--rehearse", "--eval-interval", "1"])
    config, problems = read_config(words, 2)
    assert problems == []
    assert (config.total_steps, config.training.eval_interval) == (2, 1), "what stands behind --rehearse wins"
    own = read_config(flags, launched(script).ranks)[0]
    for section in ("algorithm", "quantization"):  # the algorithm and the formats are the recipe's own
        before, after = getattr(own, section), getattr(config, section)
        changed = {name for name in vars(before) if getattr(before, name) != getattr(after, name)}
        assert changed <= {"grpo_prompts_per_step", "grpo_group_size", "rl_oversampling"}
    assert own.parallel.expert_model_parallel_size == 1 or config.parallel.expert_model_parallel_size == 2


STAGE1 = EXAMPLES / "infir2_fp8_7b" / "stage1.sh"


def test_an_estimate_is_of_the_recipes_own_ranks(tmp_path: Path) -> None:
    """One process, from any folder, without torchrun; what the user adds wins."""
    variables = os.environ | {"MODEL": str(_published(tmp_path, "Qwen2.5-7B"))}
    command = ["bash", str(STAGE1), "--estimate", "--estimate-vocab-size", "152064"]
    for further, ranks in (([], 32), (["--check-world-size", "16"], 16)):
        run = subprocess.run([*command, *further], env=variables, cwd=tmp_path, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert f"ranks: {ranks} (tensor 4 x context 2" in run.stdout


def test_nodes_meet_at_the_first_one() -> None:
    """On one node any free port does."""
    words = launched(STAGE1, NODE_RANK="3", MASTER_ADDR="node0").torchrun
    assert words == (
        "--nnodes", "4", "--nproc-per-node", "8", "--node-rank", "3", "--master-addr", "node0", "--master-port", "29500"
    )  # fmt: skip
    assert launched(STAGE1, NNODES="1").torchrun[-1] == "--standalone"


def test_recipes_are_found() -> None:
    assert {
        "infir2_fp8_7b/stage1", "infir2_fp8_7b/stage2", "qwen3_30b_a3b_fp8/fp8", "qwen3_30b_a3b_fp8/fp8_rollouts",
        "qwen2p5_32b_grpo/run",
    } <= set(map(_name, SCRIPTS))  # fmt: skip
