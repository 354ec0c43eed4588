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


@pytest.mark.parametrize("extra", [(), ("--ragged", "--greedy")])
def test_rollout(tmp_path: Path, extra: tuple[str, ...]) -> None:
    record = benchmark("rollout", tmp_path / "r.json", "--batch", "8", "--group", "4", *extra)
    assert set(record["tokens_per_cpu_second"]) == {"ours", "hf", "stock"}
    assert set(record["ratio"]) == {"ours/hf", "ours/stock", "hf", "stock"}
    assert record["ratio"]["hf"] == record["ratio"]["ours/hf"]
    assert len(record["rounds"]) == 1
    lengths = set(record["mean_length"].values())
    assert all(1 < length < 5 for length in lengths) if extra else lengths == {5}
    assert record["greedy_agreement"] == {"hf": 1.0, "stock": 1.0}
    assert record["command"].startswith("python -m tools.benchmark.rollout --shape 32x1")
    assert record["hardware"] and record["date"]


def test_update(tmp_path: Path) -> None:
    record = benchmark("update", tmp_path / "u.json", "--samples", "12", "--micro-batch", "4")
    assert set(record["ratio"]) == {"ours/plain"}
    first = record["first_update"]
    assert first["ours"] == pytest.approx(first["plain"], rel=1e-4)
    assert first["ours"]["grad_norm"] > 0


@pytest.mark.parametrize("backend", ["auto", "paged"])
def test_conversations(tmp_path: Path, backend: str) -> None:
    sizes = ["--batch", "4", "--group", "2", "--turns", "3", "--reply-tokens", "4", "--prompt-tokens", "20"]
    record = benchmark("conversations", tmp_path / "c.json", *sizes, "--attention-backend", backend)
    reuse, anew = (record["statistics"][name] for name in ("reuse", "anew"))
    assert anew["reused_tokens"] == 0
    assert reuse["prefill_tokens"] + reuse["reused_tokens"] == anew["prefill_tokens"] == 2 * 20 + 4 * (29 + 38)
    assert reuse["prefill_tokens"] < anew["prefill_tokens"] / 2
