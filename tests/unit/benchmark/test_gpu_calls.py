"""The calls for a GPU: what is in them, and what a step that fails or hangs costs."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.gpu import smoke
from tools.benchmark import gpu_calls
from tools.benchmark.gpu import SECTIONS
from tools.benchmark.gpu_calls import CALLS, SECONDS, Step, keep_kernels, run_call, take_kernels

ROOT = Path(__file__).parents[3]


def commands(call: str) -> str:
    return "\n".join(" ".join(step.command) for step in CALLS[call])


def test_every_file_of_tests_gpu_has_a_process_of_its_own() -> None:
    files = {f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_*.py")}
    run = [step.command[-1] for step in CALLS["correctness"] if "pytest" in step.command]
    assert len(run) == len(set(run))
    assert files - set(run) == {"tests/gpu/test_gpu_transformer_engine.py"}, "not on a bare machine"


def test_every_section_is_in_a_call_and_its_budget_in_the_steps_limit() -> None:
    steps = [step for call in CALLS.values() for step in call if "tools.benchmark.gpu" in step.command]
    measured = {name: step for step in steps for name in SECTIONS if name in step.command}
    assert set(SECTIONS) - set(measured) == {"roofline"}, "the others measure it too"
    for step in steps:
        budget = sum(SECTIONS[name].budget for name in (*step.command, "roofline") if name in SECTIONS)
        assert budget + 30 <= step.limit, step.name


def test_no_record_is_written_over() -> None:
    records = [part for call in CALLS.values() for step in call for part in step.command if ".json" in part]
    assert len(set(records)) == len(records) > 5


@pytest.mark.parametrize("call", ["ranks", "bits", "numbers", "training", "large"])
def test_a_call_fits_ten_minutes_even_if_every_step_hangs(call: str) -> None:
    assert sum(step.limit for step in CALLS[call]) <= SECONDS < 600


def test_a_step_that_fails_or_hangs_costs_its_limit_and_no_more(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gpu_calls, "LEAST", 0.5)
    hangs = "import subprocess, sys, time; print('begun', flush=True); subprocess.run(['sleep', '600'])"
    steps = [
        Step("passes", ("-m", "this", "{out}"), 60),
        Step("fails", (sys.executable, "-c", "print('why'); raise SystemExit(3)"), 60),
        Step("hangs", (sys.executable, "-c", hangs), 3),
        Step("late", ("-m", "this"), 60),
    ]
    clock, results = time.monotonic, []
    started, log = clock(), tmp_path / "call.log"
    for ended in run_call(steps, log, started + 90, {"out": "folder"}):
        results.append(ended)
        if ended.step.name == "hangs":
            monkeypatch.setattr(gpu_calls.time, "monotonic", lambda: clock() + 100)
    assert clock() - started < 60
    assert [ended.verdict for ended in results] == ["ok", "FAIL", "out of time", "not begun"]
    assert [ended.said for ended in results[1:]] == ["why", "begun", "no time was left"]
    assert [ended.step for ended in results] == steps
    assert (tmp_path / "call.passes.log").read_text().splitlines()[0].endswith("-m this folder")


class Scripted:
    """A process that ends when it has been looked at so many times."""

    pid = 2**22 + 1  # no process has that number

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def poll(self) -> int | None:
        self.looks -= 1
        return None if self.looks > 0 else 0

    def kill(self) -> None:
        self.looks = 0

    def wait(self) -> int:
        return 0


def test_three_at_once_unless_one_must_be_alone(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gpu_calls, "AT_ONCE", 3)
    looks = {"a": 3, "b": 1, "c": 2, "d": 2, "M": 1, "e": 1}
    steps = [Step(name, (name,), 60, is_alone=name == "M") for name in looks]
    processes: dict[str, Scripted] = {}
    begun: list[str] = []

    def begin(command, environment, log) -> Scripted:
        begun.append(f"{command[0]} beside {''.join(name for name, one in processes.items() if one.looks > 0)}")
        return processes.setdefault(command[0], Scripted(looks[command[0]]))

    ended = run_call(steps, tmp_path / "call.log", time.monotonic() + 60, {}, begin)
    assert [one.step.name for one in ended] == ["b", "c", "a", "d", "M", "e"]
    assert begun == ["a beside ", "b beside a", "c beside ab", "d beside ac", "M beside ", "e beside "]


def test_compiled_kernels_travel(tmp_path: Path) -> None:
    keep_kernels(tmp_path / "none.tar.xz", tmp_path / "absent")
    assert not (tmp_path / "none.tar.xz").exists()
    (tmp_path / "cache" / "AB").mkdir(parents=True)
    (tmp_path / "cache" / "AB" / "kernel.cubin").write_bytes(b"code")
    keep_kernels(tmp_path / "kernels.tar.xz", tmp_path / "cache")
    assert (tmp_path / "kernels.tar.xz").read_bytes()[:6] == b"\xfd7zXZ\0"
    take_kernels(tmp_path / "kernels.tar.xz", tmp_path / "other")
    assert (tmp_path / "other" / "AB" / "kernel.cubin").read_bytes() == b"code"


def test_a_smoke_check_that_fails_is_one_line_and_the_others_go_on(monkeypatch, capsys) -> None:
    ran = {"good": (True, "fine"), "bad": (False, "why")}
    monkeypatch.setattr(smoke, "CHECKS", dict.fromkeys(ran))
    monkeypatch.setattr(smoke, "_in_a_process", lambda name: (name, ran[name][0], 1.0, ran[name][1]))
    assert smoke.main([]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == ["ok    good, 1 s: fine", "FAIL  bad, 1 s: why"]
    with pytest.raises(SystemExit, match="there is no check 'other'; use one of good, bad"):
        smoke.main(["other"])
