"""The GPU benchmark rehearsed on a CPU: every section in small, failures, deadlines and targets."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from megatron_rl.errors import ConfigError
from megatron_rl.inference.engine import EngineOptions
from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.models.attention.backend import BACKENDS, DeviceFacts
from megatron_rl.models.gpt import build_model
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import ParallelGroups
from tests.gpu import probe
from tools.benchmark import gpu, gpu_calls
from tools.benchmark.common import Shape, benchmark_config, random_prompts
from tools.benchmark.gpu import SECTIONS, Section
from tools.benchmark.gpu_calls import CALLS
from tools.benchmark.on_gpu import kernels
from tools.benchmark.on_gpu.measure import FULL, REHEARSAL, Bench, Row, guarded, one_line
from tools.benchmark.on_gpu.peer import Decoding
from tools.benchmark.on_gpu.profile import LARGEST
from tools.benchmark.on_gpu.training import log_normal_lengths
from tools.benchmark.rollout import Workload, engine_contender
from tools.benchmark.twin import twin_on_device

LATER = 3600.0
NAMES = {
    "products": {"linear", "M", "product", "us", "ratio"},
    "requantise": {"model", "recipe", "ms", "bytes", "roofline_ms", "ratio"},
    "decode_0.5B": {"model", "format", "graphs", "batch", "step_ms", "roofline_ms", "ratio", "rows"},
    "decode_7B": {"model", "format", "graphs", "batch", "step_ms", "roofline_ms", "ratio", "rows"},
    "decode_30B": {"model", "layers", "format", "graphs", "batch", "step_ms", "whole_ms"},
    "decode_32B": {"model", "layers", "format", "graphs", "batch", "step_ms", "whole_ms"},
    "attention": {"attention", "batch", "context", "step_ms"},
    "peer": {"model", "batch", "context", "ours_ms", "theirs_ms", "ours_over_theirs", "theirs_over_roofline"},
    "prefill": {"model", "tokens_per_second", "mfu"},
    "training": {"model", "lengths", "tokens_per_second", "over_equal", "mfu"},
    "grpo": {"rollouts", "ms", "gen_ms", "old_log_prob_ms", "update_actor_ms", "generated_tokens"},
}

@pytest.mark.parametrize("name", gpu.SWITCHES)
def test_what_can_be_switched_on_is_off(name: str) -> None:
    module, constant = gpu.SWITCHES[name]
    assert getattr(pytest.importorskip(module), constant) is False


on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="sections take minutes there: run the benchmark")


@pytest.fixture
def bench(one_rank: ParallelGroups) -> Bench:
    return Bench(current_platform(), one_rank, REHEARSAL)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, one_rank: ParallelGroups) -> Iterator[Path]:
    """What a rehearsal of all calls leaves behind, of the probe and of every section, begun in this process.

    A process of its own for each takes three CPU seconds to begin: `python -m tools.benchmark.gpu_calls all` does that.
    """
    folder = tmp_path_factory.mktemp("calls")
    steps = [step.name for call in CALLS.values() for step in call if step.name.startswith("gpu ")]
    only = [f"--only={name}" for name in ("probe", *steps)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "ranks_of", lambda config: contextlib.nullcontext(one_rank))
        assert gpu_calls.main(["all", "--out", str(folder), *only], Here) == 0
    yield folder


class Here:
    """A step, run in this process as soon as it is begun."""

    pid = 2**22 + 1  # no process has that number

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: BinaryIO) -> None:
        interpreter, option, module, *arguments = command
        assert (interpreter, option) == (sys.executable, "-m")
        with io.TextIOWrapper(log, write_through=True) as text, contextlib.redirect_stdout(text):
            self.code = {"tools.benchmark.gpu": gpu.main, "tests.gpu.probe": lambda _: probe.main()}[module](arguments)

    def poll(self) -> int:
        return self.code or 0

    wait = poll

    def kill(self) -> None:
        """It has ended."""


@pytest.fixture(scope="module")
def records(out: Path) -> list[dict[str, Any]]:
    """Of all sections."""
    return [json.loads(path.read_text()) for path in out.glob("gpu_*.json")]


@pytest.fixture(scope="module")
def rehearsal(records: list[dict[str, Any]]) -> dict[str, list[Row]]:
    """The rows of all sections."""
    return {name: rows for record in records for name, rows in record["sections"].items()}


@on_cpu
def test_the_calls_leave_a_log_a_step_and_a_record_a_section(out: Path, records: list[dict[str, Any]]) -> None:
    logs = {path.name for path in out.glob("*.log")}
    assert {"correctness.probe.log", "numbers.gpu_decode_7B.log", "training.gpu_grpo.log"} <= logs
    assert len(logs) == len(records) + 1 == len(SECTIONS), "the roofline is measured by all, the probe has no record"
    assert "5 of 5" in (out / "correctness.probe.log").read_text()
    for record in records:
        assert list(record["sections"])[0] == "roofline", "the others divide by it"
        assert record["rehearsal"] is True
        assert record["command"] and record["commit"] and record["versions"]["torch"]
    log = (out / "numbers.gpu_requantise.log").read_text()
    assert "mean nothing" in log and "measured, " in log and "largest kernels of requantise" in log


@on_cpu
def test_the_largest_kernels_of_each_step_are_listed(records: list[dict[str, Any]]) -> None:
    found = {name: rows for record in records for name, rows in record["kernels"].items()}
    for name in ("decode_0.5B", "decode_7B", "decode_30B", "decode_32B", "peer", "prefill", "training", "requantise"):
        rows = found[name]
        assert [row["error"] for row in rows if "error" in row] == []
        for of in {row["of"] for row in rows}:
            of_one = [row for row in rows if row["of"] == of]
            assert 5 < len(of_one) <= LARGEST and 0.5 < sum(row["share"] for row in of_one) <= 1.001
            assert [row["us"] for row in of_one] == sorted((row["us"] for row in of_one), reverse=True)
    assert {row["of"] for row in found["training"]} == {"equal lengths", "log-normal lengths"}


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
    kinds = {(kind, graphs) for kind in ("bf16", "fp8", "int8", "fp8 + fp8 KV") for graphs in (False, True)}
    assert {(kind, graphs) for kind, graphs, _ in measured} | skipped == kinds
    assert all(row["rows"] >= row["batch"] for row in rows if "step_ms" in row)


@on_cpu
def test_plain_torch_is_measured_on_every_batch_beside_us(rehearsal: dict[str, list[Row]]) -> None:
    rows = rehearsal["peer"]
    assert [(row["model"], row["batch"]) for row in rows] == [("0.5B", 1), ("0.5B", 4), ("7B", 1), ("7B", 4)]
    assert all(row["ours_over_theirs"] == row["ours_ms"] / row["theirs_ms"] for row in rows)


@pytest.mark.parametrize("shape", [REHEARSAL.small, REHEARSAL.middle], ids=["tied", "untied"])
def test_the_step_of_plain_torch_picks_the_token_of_our_forward_pass(one_rank: ParallelGroups, shape: Shape) -> None:
    """Of three prompts in two rows each; a second step from the same tokens picks the same ones."""
    policy = build_model(benchmark_config(shape, 32), current_platform(), shape.vocab)
    prompts = random_prompts(3, 20, shape.vocab, seed=5)
    engine = RolloutEngine(policy, EngineOptions(3, 32), [], str)
    answers = engine_contender(engine, policy, Workload(prompts, group=1, longest=1, greedy=True))(0, True)
    rows = torch.tensor(prompts)
    decoding = Decoding(twin_on_device(policy, 32), rows, copies=2)
    for _ in range(2):
        decoding.step()
        assert decoding.tokens.flatten().tolist() == [token for (token,) in answers for _ in range(2)]
        decoding.tokens.copy_(rows[:, -1:].repeat_interleave(2, 0))


def test_the_model_of_plain_torch_is_built_on_the_device(one_rank: ParallelGroups) -> None:
    policy = build_model(benchmark_config(REHEARSAL.small, 32, "--bf16"), current_platform(), REHEARSAL.small.vocab)
    twin = twin_on_device(replace(policy, device=torch.device("meta")), 32)
    assert all(tensor.is_meta for tensor in (*twin.parameters(), *twin.buffers()))
    assert {parameter.dtype for parameter in twin.parameters()} == {torch.bfloat16}


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
def test_unequal_lengths_are_as_many_tokens(rehearsal: dict[str, list[Row]]) -> None:
    equal, unequal, *in_fp8 = rehearsal["training"]
    assert [row["format"] for row in in_fp8] == ["fp8 forward", "fp8 forward and backward"]
    assert (equal["lengths"], unequal["lengths"]) == ("equal", "log-normal")
    assert equal["tokens"] == unequal["tokens"] and equal["samples"] < unequal["samples"]
    assert equal["over_equal"] == 1.0 and unequal["over_equal"] == pytest.approx(unequal["ms"] / equal["ms"])


def test_log_normal_lengths() -> None:
    for seed in range(20):
        lengths = log_normal_lengths(32 * 1024, 1024, seed)
        assert sum(lengths) == 32 * 1024 and min(lengths) >= 8 and max(lengths) <= 1024
        assert 64 < len(lengths) < 180 and sorted(lengths)[len(lengths) // 2] < 400


@on_cpu
def test_no_keys_are_read_twice_before_a_gpu_s_cache_is_full(bench: Bench) -> None:
    rotated = 2**17
    every = replace(bench, sizes=replace(REHEARSAL, rotated_bytes=rotated, inner=1))
    rows = [row for row in kernels.decode_attention(every) if "us" in row]
    assert rows and all(row["bytes"] * row["layers"] >= rotated for row in rows)
    assert FULL.rotated_bytes > 2 * 60e6, "Hopper's second cache"


# -- failures and deadlines --------------------------------------------------------------------


def _breaks_off(bench: Bench):
    yield {"x": 1}
    raise ValueError("\n  the kernel is gone  \nand more")


def _never_ends(bench: Bench):
    while True:
        time.sleep(0.001)
        yield {"x": 1}


def test_rows_are_written_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_rank: object) -> None:
    path, seen = tmp_path / "g.json", []

    def measure(bench: Bench):
        for number in range(3):
            yield {"x": number}
            seen.append(json.loads(path.read_text())["sections"]["slow"])

    monkeypatch.setattr(gpu, "SECTIONS", {"slow": Section(measure, 10.0)})
    monkeypatch.setattr(gpu, "ranks_of", lambda config: contextlib.nullcontext(one_rank))
    gpu.main(["slow", "--json", str(path)])
    assert seen == [[{"x": 0}], [{"x": 0}, {"x": 1}], [{"x": 0}, {"x": 1}, {"x": 2}]]


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


def test_the_whole_takes_less_than_fourteen_minutes() -> None:
    assert sum(section.budget for section in SECTIONS.values()) + 40 <= gpu.SECONDS <= 840
