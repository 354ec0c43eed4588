"""The benchmark of decode attention, in small."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_rl.attention.backend import DeviceFacts
from megatron_rl.registry import BACKENDS
from tests.support.forks import run_python


def test_every_backend_is_measured_or_says_why_not(tmp_path: Path) -> None:
    result = run_python("-m", "tools.benchmark.attention", "--quick", "--json", tmp_path / "a.json")
    assert result.returncode == 0, result.stderr[-3000:]
    record = json.loads((tmp_path / "a.json").read_text())
    measured = {row["backend"] for row in record["decode"]}
    skipped = {name.split()[0] for name in record["skipped"]}
    assert measured | skipped == {name for name in BACKENDS.names() if BACKENDS.get(name).cache is not None}
    assert {"sdpa", "paged"} <= measured
    assert BACKENDS.get("flash").problem(DeviceFacts("cpu")) in result.stdout
    plain, fp8 = (
        next(row for row in record["decode"] if row["backend"] == "sdpa" and (row["cache"] == "fp8") == is_fp8)
        for is_fp8 in (False, True)
    )
    read = {row["cache"]: row["bytes_per_second"] * row["seconds"] for row in (plain, fp8)}
    # Two rows of 64 tokens, keys and values of 2 heads of 16 numbers, fp32 (bf16 on a GPU) or a byte each.
    assert round(read["fp8"]) == 2 * 2 * 64 * 2 * 16
    assert read[plain["cache"]] >= 1.9 * read["fp8"]
