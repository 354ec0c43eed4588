"""The benchmarks run from the command line and compare the same model with itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import run_python

SMALL = ["--shape", "32x1", "--vocab", "16", "--prompt-tokens", "3", "--new-tokens", "5", "--rounds", "1"]


def benchmark(module: str, record: Path, *arguments: str) -> dict[str, Any]:
    """Run it in a process of its own, because it makes process groups of its own."""
    result = run_python("-m", f"tools.benchmark.{module}", *SMALL, *arguments, "--json", record)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "tokens / CPU s" in result.stdout
    return json.loads(record.read_text())


@pytest.mark.parametrize("extra", [pytest.param((), marks=pytest.mark.long), ("--ragged", "--greedy")])
def test_rollout(tmp_path: Path, extra: tuple[str, ...]) -> None:
    record = benchmark("rollout", tmp_path / "r.json", "--batch", "8", "--group", "4", *extra)
    assert set(record["median"]) == {"ours", "hf", "stock"}
    assert set(record["ratio"]) == {"ours/hf", "ours/stock"}
    assert len(record["rounds"]) == 1
    lengths = set(record["mean_length"].values())
    assert all(1 < length < 5 for length in lengths) if extra else lengths == {5}
    assert record["greedy_agreement"] == {"hf": 1.0, "stock": 1.0}
    assert record["command"].startswith("python -m tools.benchmark.rollout --shape 32x1")
    assert record["hardware"] and record["date"]


def test_partial(tmp_path: Path) -> None:
    record = tmp_path / "p.json"
    sizes = ("--shape", "32x1", "--vocab", "16", "--prompts", "2", "--group", "3", "--at-once", "4", "--median", "8")
    result = run_python("-m", "tools.benchmark.partial", *sizes, "--rounds", "1", "--json", record)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(record.read_text())
    assert set(found["median"]) == {"partial", "waiting"}
    assert 0 < found["stale_share"] < 1
    assert 1 <= found["lag_max"] <= 3


def test_update(tmp_path: Path) -> None:
    record = benchmark("update", tmp_path / "u.json", "--samples", "12", "--micro-batch", "4")
    assert set(record["ratio"]) == {"ours/plain"}
    first = record["first_update"]
    assert first["ours"] == pytest.approx(first["plain"], rel=1e-4)
    assert first["ours"][1] > 0


def test_update_with_shared_prompts(tmp_path: Path) -> None:
    record = benchmark("update", tmp_path / "u.json", "--samples", "12", "--micro-batch", "4", "--group", "4")
    assert set(record["ratio"]) == {"ours/each"}
    first = record["first_update"]
    assert first["ours"] == pytest.approx(first["each"], rel=1e-4)


@pytest.mark.parametrize(
    "module", ["rollout", "partial", "update", "checkpoint", "context", "stages", "gpu", "memory"]
)
def test_every_benchmark_says_its_flags(module: str) -> None:
    result = run_python("-m", f"tools.benchmark.{module}", "--help")
    assert result.returncode == 0 and "--json" in result.stdout


@pytest.mark.parametrize(
    ("module", "sizes"),
    [("update", ("--samples", "8", "--micro-batch", "4")), ("rollout", ("--batch", "8", "--group", "4"))],
)
def test_experts(tmp_path: Path, module: str, sizes: tuple[str, ...]) -> None:
    record = benchmark(module, tmp_path / "e.json", "--experts", "4", *sizes)
    assert set(record["ratio"]) == {"ours/loop"}
    if module == "rollout":
        assert record["greedy_agreement"] == {"loop": 1.0}
    else:
        assert record["first_update"]["ours"] == pytest.approx(record["first_update"]["loop"], rel=1e-4)
