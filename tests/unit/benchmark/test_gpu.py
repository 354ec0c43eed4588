"""The GPU benchmark rehearsed on a CPU: every section in small, failures, deadlines and targets."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_rl.errors import ConfigError
from megatron_rl.models.attention.backend import DeviceFacts
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.registry import BACKENDS
from tests.support.forks import run_python
from tools.benchmark import gpu
from tools.benchmark.gpu import SECTIONS, Section
from tools.benchmark.on_gpu.measure import REHEARSAL, Bench, Row, guarded, one_line

LATER = 3600.0
NAMES = {
    "products": {"linear", "M", "product", "us", "ratio"},
    "requantise": {"model", "recipe", "ms", "bytes", "roofline_ms", "ratio"},
    "decode_0.5B": {"model", "format", "graphs", "batch", "step_ms", "roofline_ms", "ratio", "rows"},
    "decode_7B": {"model", "format", "graphs", "batch", "step_ms", "roofline_ms", "ratio", "rows"},
    "decode_32B": {"model", "layers", "format", "graphs", "batch", "step_ms", "whole_ms"},
    "attention": {"attention", "batch", "context", "step_ms"},
    "prefill": {"model", "tokens_per_second", "mfu"},
    "training": {"model", "tokens_per_second", "mfu"},
    "grpo": {"rollouts", "ms", "gen_ms", "old_log_prob_ms", "update_actor_ms", "generated_tokens"},
}

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="sections take minutes there: run the benchmark")


@pytest.fixture
def bench(one_rank: ParallelGroups) -> Bench:
    return Bench(current_platform(), one_rank, REHEARSAL)


@pytest.fixture(scope="module")
def rehearsal(one_rank: ParallelGroups) -> dict[str, list[Row]]:
    """All sections once."""
    bench = Bench(current_platform(), one_rank, REHEARSAL)
    return {name: list(gpu.measured(section, bench, time.time() + LATER)) for name, section in SECTIONS.items()}


@on_cpu
def test_no_section_fails(rehearsal: dict[str, list[Row]]) -> None:
    for name, rows in rehearsal.items():
        assert rows and [row["error"] for row in rows if "error" in row] == [], name


@on_cpu
@pytest.mark.parametrize("name", NAMES)
def test_rows_say_what_was_measured(name: str, rehearsal: dict[str, list[Row]]) -> None:
    rows = [row for row in rehearsal[name] if "skipped" not in row]
    assert rows and all(row.keys() >= NAMES[name] for row in rows)
    assert all(value > 0 for row in rows for key, value in row.items() if key.endswith(("ms", "us", "per_second")))


@on_cpu
def test_decode_goes_through_every_batch_and_format(rehearsal: dict[str, list[Row]]) -> None:
    rows = rehearsal["decode_7B"]
    measured = {(row["format"], row["graphs"], row["batch"]) for row in rows if "step_ms" in row}
    skipped = {(row["format"], row["graphs"]) for row in rows if "skipped" in row}
    assert {("bf16", False, 1), ("bf16", False, 4), ("fp8", False, 4)} <= measured
    kinds = {(kind, graphs) for kind in ("bf16", "fp8", "fp8 + fp8 KV") for graphs in (False, True)}
    assert {(kind, graphs) for kind, graphs, _ in measured} | skipped == kinds
    assert all(row["rows"] >= row["batch"] for row in rows if "step_ms" in row)


@on_cpu
def test_every_share_is_of_the_measured_ceiling(rehearsal: dict[str, list[Row]]) -> None:
    rate = next(row["rate"] for row in rehearsal["roofline"])
    for row in rehearsal["requantise"]:
        assert row["roofline_ms"] == pytest.approx(1e3 * row["bytes"] / rate)
        assert row["ratio"] == pytest.approx(row["ms"] / row["roofline_ms"])


@on_cpu
def test_every_attention_backend_is_measured_or_says_why_not(rehearsal: dict[str, list[Row]]) -> None:
    rows = rehearsal["decode_attention"]
    assert {row["backend"] for row in rows} == {n for n in BACKENDS.names() if BACKENDS.get(n).cache is not None}
    assert BACKENDS.get("varlen").problem(DeviceFacts("cpu")) in [row.get("skipped") for row in rows]
    equal = [row for row in rows if row["backend"] == "sdpa" and row.get("lengths") == "equal"]
    # Two rows of 64 tokens, keys and values of 2 heads of 16 numbers, in fp32 and in bytes.
    assert [row["bytes"] for row in equal] == [2 * 2 * 64 * 2 * 16 * 4, 2 * 2 * 64 * 2 * 16]


@on_cpu
def test_the_command(tmp_path: Path) -> None:
    """In a process of its own."""
    result = run_python("-m", "tools.benchmark.gpu", "requantise", "--json", tmp_path / "g.json")
    assert result.returncode == 0, result.stderr[-3000:]
    assert "mean nothing" in result.stdout and "measured, " in result.stdout
    record = json.loads((tmp_path / "g.json").read_text())
    assert record["rehearsal"] is True
    assert list(record["sections"]) == ["roofline", "requantise"]  # the others divide by the first
    assert [row["recipe"] for row in record["sections"]["requantise"]] == ["fp8", "fp8_block", "int8"]
    assert record["command"] and record["commit"] and record["versions"]["torch"]


# -- failures and deadlines --------------------------------------------------------------------


def _breaks_off(bench: Bench):
    yield {"x": 1}
    raise ValueError("\n  the kernel is gone  \nand more")


def _never_ends(bench: Bench):
    while True:
        time.sleep(0.001)
        yield {"x": 1}


def test_a_section_that_fails_keeps_its_rows(bench: Bench) -> None:
    rows = list(gpu.measured(Section(_breaks_off, 10.0), bench, time.time() + LATER))
    assert rows == [{"x": 1}, {"error": "ValueError: the kernel is gone"}]


@pytest.mark.parametrize(("budget", "until"), [(0.05, LATER), (LATER, 0.05)])
def test_a_section_ends_with_its_time(bench: Bench, budget: float, until: float) -> None:
    rows = list(gpu.measured(Section(_never_ends, budget), bench, time.time() + until))
    assert rows[0] == {"x": 1} and rows[-1] == {"skipped": "its time was over"}


def test_labels_stay_with_the_error() -> None:
    assert list(guarded(_breaks_off(None), {"batch": 8})) == [
        {"batch": 8, "x": 1},
        {"batch": 8, "error": "ValueError: the kernel is gone"},
    ]
    assert one_line(KeyError()) == "KeyError: no message"


@pytest.mark.parametrize("refusal", [SystemExit("--this is refused"), ConfigError(["--this is refused"])])
def test_a_refused_flag_is_no_failure(refusal: BaseException) -> None:
    def refused():
        raise refusal
        yield

    ((row),) = guarded(refused(), {"batch": 8})
    assert row["batch"] == 8 and row["skipped"].endswith("--this is refused")


# -- the command -----------------------------------------------------------------------------


def test_the_last_line_counts_by_hand() -> None:
    rows = [{"ms": 1.0}, {"ms": 2.0}, {"error": "why"}, {"skipped": "not built"}]
    assert gpu.tally({"decode_7B": rows, "grpo": [{"ms": 3.0}]}) == ("3 measured, 1 skipped, 1 failed", 1)


def test_an_unknown_section_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["decode_70B"])
    assert "there is no section 'decode_70B'; use one of roofline, decode_attention" in capsys.readouterr().err


def test_seconds_leaves_out_the_first_run(bench: Bench) -> None:
    runs = []
    assert replace(bench, sizes=replace(REHEARSAL, repeats=2)).seconds(lambda: runs.append(1), inner=3) >= 0
    assert len(runs) == 9


def test_the_whole_takes_less_than_twelve_minutes() -> None:
    assert sum(section.budget for section in SECTIONS.values()) + 40 <= gpu.SECONDS <= 720
