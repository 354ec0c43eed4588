"""The script for Slurm: it parses, starts one launcher a node, and its flags are valid for its ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from megatron_rl.config.arguments import read_config
from megatron_rl.config.rules import validate
from tests.unit.families.test_published_models import QWEN2_5

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"
QWEN2_5_7B = {
    **QWEN2_5, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "vocab_size": 152064, "max_position_embeddings": 32768,
}  # fmt: skip
STUBS = {
    "scontrol": 'printf "node7\\nnode8\\n"',
    "srun": 'shift; SLURM_NODEID=1 exec "$@"',
    "torchrun": 'printf "%s\\0" "$@" "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT"',
}
"""Programs of a cluster that only say what they were asked."""


@pytest.fixture
def printed(tmp_path: Path) -> list[str]:
    """What ``torchrun`` is given on the second node, and the seconds that it leaves its ranks."""
    for name, line in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN2_5_7B))
    (model / "tokenizer_config.json").touch()
    cluster = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[7-8]"}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MODEL": str(model), **cluster}
    argv = ["bash", str(SCRIPT), "--train-iters", "70"]
    return subprocess.run(argv, env=environment, check=True, capture_output=True, text=True).stdout.split("\0")[:-1]


@pytest.fixture
def words(printed: list[str]) -> list[str]:
    return printed[:-1]


def test_the_shell_can_read_it() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


def test_every_node_starts_its_ranks_and_knows_the_first_one(words: list[str]) -> None:
    launcher = words[: words.index("train_rl.py")]
    given = dict(zip(launcher[::2], launcher[1::2], strict=True))
    assert given == {
        "--nnodes": "2", "--node-rank": "1", "--nproc-per-node": "8",
        "--master-addr": "node7", "--master-port": "29500",
    }  # fmt: skip


def test_its_flags_are_valid_for_its_ranks_and_further_ones_win(words: list[str]) -> None:
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\d+)$", SCRIPT.read_text(), re.MULTILINE))
    ranks = int(asked["nodes"]) * int(asked["gpus-per-node"])
    config, problems = read_config(words[words.index("train_rl.py") + 1 :], ranks)
    assert problems == validate(config, ranks) == []
    assert (ranks, config.data_parallel_size(ranks), config.total_steps) == (16, 8, 70)


def test_torchrun_gives_the_ranks_as_long_to_save_as_slurm_does(
    printed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.launcher.api import LaunchConfig

    (signalled,) = re.findall(r"^#SBATCH --signal=TERM@(\d+)$", SCRIPT.read_text(), re.MULTILINE)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", printed[-1])
    assert LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1).shutdown_timeout == int(signalled) == 300
