"""How `tests.gpu.bits` judges, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gpu import bits

ROW = {"actor/grad_norm": 0.25, "critic/score/mean": 1.0}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([ROW, ROW], "same bits in 2 steps"),
        ([ROW], "FAIL 1 rows instead of 2"),
        ([ROW, ROW | {"actor/grad_norm": 0.25000000001}], "FAIL step 2: 1 metrics differ, actor/grad_norm is 0.25 and"),
        ([ROW | {"new": 1}, ROW], "FAIL step 1: 1 metrics differ, new is None and 1"),
    ],
)
def test_runs_are_compared_in_all_digits(rows, said):
    assert bits.compared([ROW, ROW], rows).startswith(said)


def test_what_a_clock_decides_is_not_compared(tmp_path: Path):
    timed = ROW | {"timing_s/gen": 1.5, "perf/mfu": 0.1, "environment/fork_servers": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(timed))
    assert bits.rows_of(tmp_path) == [ROW]


def test_split_k_is_left_no_workspace_in_the_process_that_has_to_repeat(tmp_path: Path, monkeypatch):
    given = []

    def run(command: list[str], *, env: dict[str, str], **_: object) -> SimpleNamespace:
        given.append(("--invariant" in command, env.get("CUBLASLT_WORKSPACE_SIZE")))
        return SimpleNamespace(stdout="", stderr="", returncode=0)

    monkeypatch.setattr(bits.subprocess, "run", run)
    bits.operations(tmp_path)
    assert given == [(False, None), (True, "0")]


def test_operations_are_rehearsed(capsys: pytest.CaptureFixture):
    """One that looks at its neighbours shows, and one that raises ends nothing."""
    operations = bits.Operations(invariant=True)
    operations.products()
    operations.over_rows("of neighbours", lambda x: x - x.mean(), operations.random(32, 64))
    operations.over_rows("broken", lambda x: x.view(7), operations.random(32, 64))
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("GEMM small") and "same bits; " in first
    assert "| other bits at [4, 8]; " in second
    assert "| RuntimeError: " in third
