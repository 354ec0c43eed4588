"""The benchmark of quantised rollouts: every section in small, and what is worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_rl.quantization.products import cpu_multiplies_int8
from tests.support.forks import run_python
from tools.benchmark import quantization
from tools.benchmark.common import cpu_capability, hardware, summarise

WITH_M = ["-m", "tools.benchmark.quantization"]
AS_A_FILE = ["tools/benchmark/quantization.py"]
RECIPES = set(quantization.RECIPES)

needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="CPU seconds")


def run(start: list[str], *arguments: str) -> str:
    """In a process of its own, because it makes process groups of its own."""
    result = run_python(*start, *arguments)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@needs_cpu
def test_all_sections(tmp_path: Path) -> None:
    shown = run(WITH_M, "--quick", "--json", str(tmp_path / "q.json"))
    record = json.loads((tmp_path / "q.json").read_text())
    refresh, rollout, memory = (record[name]["32x1"] for name in ("refresh", "rollout", "memory"))
    assert set(refresh["bytes_per_cpu_second"]) == {"copy", *RECIPES}
    assert {"none fp32", "none bf16", "int8 bf16", "fp8_tensor fp32"} <= set(rollout["tokens_per_cpu_second"])
    assert rollout["int8_bf16_over_none_bf16"] > 0
    assert set(memory) == RECIPES
    # qkv 64 x 32, proj 32 x 32, fc1 192 x 32, fc2 32 x 96: 12288 fp32 numbers
    assert refresh["weight_bytes"] == 4 * 12288
    operand = 0 if cpu_multiplies_int8() else 4 * 12288  # codes are multiplied as fp32 without VNNI
    assert memory["int8"]["cpu_operand"] == operand
    assert memory["int8"]["bf16_weights"] == 2 * 12288
    assert memory["int8"]["copies"] == 12288 + 4 * (64 + 32 + 192 + 32)  # a scale a row
    assert "copies / bf16" in shown
    assert record["command"].startswith("python -m tools.benchmark.quantization --quick")
    assert record["commit"] and record["versions"]["torch"] and "AVX" in record["hardware"]


@needs_cpu
def test_runs_by_its_path_too() -> None:
    shown = run(AS_A_FILE, "memory", "--quick")
    assert "copies / bf16" in shown
    assert "tokens / CPU s" not in shown


@pytest.mark.parametrize("module", ["rollout", "update", "loop", "quantization", "step", "logprob_memory", "gpu"])
def test_every_benchmark_runs_by_its_path(module: str) -> None:
    assert "--json" in run([f"tools/benchmark/{module}.py"], "--help")


def test_an_unknown_section_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        quantization.parse(["refesh"])
    assert "use one of refresh, rollout, memory" in capsys.readouterr().err


def test_the_unit_names_the_column() -> None:
    summary = summarise([{"copy": 8.0, "int8": 2.0}], "copy", "bytes")
    assert summary["bytes_per_cpu_second"] == {"copy": 8.0, "int8": 2.0}
    assert summary["ratio"] == {"copy/int8": 4.0}


def test_hardware_names_the_instructions() -> None:
    assert all(name in hardware() for name in cpu_capability())
    assert [name.removeprefix("no ") for name in cpu_capability()[1:]] == ["VNNI", "AMX"]
