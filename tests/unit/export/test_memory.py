"""A conversion's peak memory is below twice the largest shard, however many shards there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).parents[3]
SHARDS, ROWS, COLUMNS, MATRICES = 6, 2048, 2048, 6

_MEASURE = """
import sys
from pathlib import Path
import torch
from safetensors.torch import load_file
from megatron_rl.checkpoint.hf.quantize import convert, target_format
from megatron_rl.registry import RECIPES

def kilobytes(key):
    return int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1])

what, source, output = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
RECIPES.get("fp8_block")  # its modules are loaded before the measurement
before = kilobytes("VmRSS")
if what == "all at once":
    held = [load_file(path) for path in sorted(source.glob("*.safetensors"))]
    total = sum(float(t.float().sum()) for tensors in held for t in tensors.values())
else:
    convert(source, output, target_format(what, False))
print(1024 * (kilobytes("VmHWM") - before))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six shards of 48 MiB; one is an embedding and a single matrix."""
    directory = tmp_path_factory.mktemp("many")
    weight_map = {}
    for shard in range(SHARDS):
        name = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        part = {
            f"model.layers.{shard}.mlp.experts.{i}.up_proj.weight": torch.empty(ROWS, COLUMNS).normal_().bfloat16()
            for i in range(MATRICES)
        }
        if shard == 0:
            part = {
                "model.embed_tokens.weight": torch.zeros(MATRICES * ROWS // 2, COLUMNS).bfloat16(),
                "model.layers.0.mlp.up_proj.weight": torch.ones(MATRICES * ROWS // 2, COLUMNS).bfloat16(),
            }
        save_file(part, directory / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, name))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text("{}")
    return directory


def _peak(what: str, source: Path, output: Path) -> int:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _MEASURE, what, str(source), str(output)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
@pytest.mark.parametrize(
    "what",
    ["fp8_block", "all at once", *(pytest.param(what, marks=pytest.mark.long) for what in ("fp8_channel", "int8"))],
)
def test_the_peak_is_below_twice_the_largest_shard(source: Path, tmp_path: Path, what: str) -> None:
    """Control: all shards in memory at once are above it."""
    largest = max(path.stat().st_size for path in source.glob("*.safetensors"))
    peak = _peak(what, source, tmp_path / "out")
    assert (peak < 2 * largest) is (what != "all at once"), f"{peak / largest:.2f} shards"
