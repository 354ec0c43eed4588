"""The worker pool: hanging, dying and misbehaving graders cost nobody else a grade."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from megatron_rl.environments.workers import WorkerPool
from megatron_rl.errors import EnvironmentFault
from megatron_rl.types import Grade, Task, Transcript

FAULTY = "faulty_graders:Faulty"
DEADLINE = 1.0
"""Long for a grade that takes a millisecond: the machine may be busy."""


@pytest.fixture(scope="module")
def pool(hostile_path: None) -> Iterator[WorkerPool]:
    with contextlib.closing(WorkerPool(8, memory_mb=1024, environments=[(FAULTY, {})])) as pool:
        yield pool


def sample(text: str, mark: Path | str = "") -> tuple[Task, Transcript]:
    return Task("0", "?", {"mark": str(mark)}), Transcript(text, "stop", len(text))


def grade(pool: WorkerPool, *texts: str, deadline_s: float = 5.0) -> list[Grade]:
    return pool.grade(FAULTY, {}, [sample(text) for text in texts], deadline_s, -1.0)


def rise(pool: WorkerPool, before: dict[str, int]) -> dict[str, int]:
    """The counters that changed, by how much."""
    return {name: value - before[name] for name, value in pool.counters().items() if value != before[name]}


def test_grades_come_back_in_order_with_options_and_reasons(pool):
    results = pool.grade(FAULTY, {"bonus": 0.5}, [sample("x" * n) for n in range(40)], DEADLINE, 0.0)
    assert [result.reward for result in results] == [n + 0.5 for n in range(40)]
    assert (results[3].status, results[3].extracted) == ("correct", "xxx")


@pytest.mark.parametrize("name", ["Faulty", "Mathematical"])
def test_what_the_grader_needs_and_nothing_else_is_imported_before_the_fork(hostile_path, name):
    reference = f"faulty_graders:{name}"
    with contextlib.closing(WorkerPool(1, environments=[(reference, {})])) as pool:
        [result] = pool.grade(reference, {}, [sample("sympy")], DEADLINE, -1.0)
    assert result.reward == (name == "Mathematical")


def test_ten_hangs_in_160_lose_no_good_item(pool):
    before = pool.counters()
    texts = ["hang" if n % 16 == 7 else "g" * n for n in range(160)]
    results = grade(pool, *texts, deadline_s=DEADLINE)
    for text, result in zip(texts, results, strict=True):
        if text == "hang":
            assert result == Grade(-1.0, status="timeout", correct=False)
        else:
            assert (result.failed, result.reward) == (False, float(len(text)))
    assert rise(pool, before) == {
        "graded": 160, "worker_timeouts": 20, "worker_respawns": 20, "retried": 10, "failed": 10,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "how"),
    [
        ("segv", "killed by SIGSEGV"),
        ("kill", "killed by SIGKILL"),
        ("os_exit", "exited with status 7"),
        ("memory", "exited with status 99"),
        ("say_null", "it answered with something else than its results"),
        ("say_nothing", "it answered with something else than its results"),
        ("say_two", "it answered with something else than its results"),
    ],
)
def test_a_worker_that_dies_twice_is_an_error_of_its_item_alone(pool, fault, how):
    before = pool.counters()
    good, bad, last = grade(pool, "good", fault, "last")
    assert (good.reward, last.reward) == (4.0, 4.0)
    assert (bad.failed, bad.code, bad.reward) == (True, "worker_died", None)
    assert how in bad.message
    assert rise(pool, before) == {"graded": 3, "worker_deaths": 2, "worker_respawns": 2, "retried": 1, "failed": 1}


@pytest.mark.parametrize(
    ("fault", "message"), [("exit", "SystemExit: 3"), ("recursion", "RecursionError")]
)
def test_what_a_grader_raises_is_tried_again_on_a_fresh_worker_and_reported(pool, fault, message):
    before = pool.counters()
    (result,) = grade(pool, fault)
    assert result.code == "environment_exception"
    assert message in result.message
    assert rise(pool, before)["retried"] == 1


@pytest.mark.parametrize("fault", ["hang", "segv", "kill", "memory", "os_exit", "exit"])
def test_a_fault_that_does_not_come_back_costs_nothing(pool, fault, tmp_path):
    before = pool.counters()
    text = f"once:{fault}"
    (result,) = pool.grade(FAULTY, {}, [sample(text, tmp_path / "mark")], DEADLINE, 0.0)
    assert (result.failed, result.reward) == (False, len(text))
    assert rise(pool, before)["retried"] == 1
    assert "failed" not in rise(pool, before)


def test_a_grader_that_swallows_everything_is_killed_all_the_same(pool):
    assert grade(pool, "spin", deadline_s=DEADLINE)[0].status == "timeout"


def test_workers_see_no_secrets_and_no_input(hostile_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with contextlib.closing(WorkerPool(1)) as pool:
        environ, stdin, interrupt = grade(pool, "environ", "stdin", "interrupt")
    names = set(environ.status.split(","))
    assert not {"HF_TOKEN", "WANDB_API_KEY"} & names
    assert len(names) < 16
    assert environ.extracted == ""
    assert stdin.reward == 0.0
    assert interrupt.reward == len("interrupt")  # Ctrl-C is for the trainer


def test_many_threads_share_the_pool(pool):
    results: dict[int, list[float]] = {}

    def work(number: int) -> None:
        results[number] = [result.reward for result in grade(pool, *["x" * number] * 20)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {number: [float(number)] * 20 for number in range(8)}


def test_a_killed_fork_server_is_replaced(hostile_path):
    with contextlib.closing(WorkerPool(2)) as pool:
        first = int(grade(pool, "pid")[0].reward)
        server = int(Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(server, signal.SIGKILL)
        with contextlib.suppress(EnvironmentFault):  # which the server answers with 503: its client asks again
            grade(pool, "good")
        assert [result.reward for result in grade(pool, *["good"] * 8)] == [4.0] * 8
        assert pool.counters()["fork_servers"] == 2


def test_replacing_a_worker_is_fast(hostile_path):
    with contextlib.closing(WorkerPool(1)) as pool:
        grade(pool, "good")
        times = []
        for _ in range(5):
            grade(pool, "good")
            pid = int(grade(pool, "pid")[0].reward)
            os.kill(pid, signal.SIGKILL)
            start = time.monotonic()
            assert grade(pool, "good")[0].reward == 4.0
            times.append(time.monotonic() - start)
    assert min(times) < 0.5, times  # 0.03 s on an idle machine


def test_a_closed_pool_refuses_and_leaves_no_process(hostile_path):
    pool = WorkerPool(2)
    pids = {int(result.reward) for result in grade(pool, *["pid"] * 8)}
    told: list[str] = []

    def wait() -> None:
        with pytest.raises(EnvironmentFault) as fault:
            grade(pool, "hang", "hang", "waits")
        told.append(str(fault.value))

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.2)
    pool.close()
    pool.close()
    waiting.join(5)
    assert len(told) == 1
    _wait_gone(pids)
    with pytest.raises(EnvironmentFault, match="closed"):
        grade(pool, "good")


def test_no_worker_outlives_a_killed_parent(hostile_path):
    program = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from megatron_rl.environments.workers import WorkerPool\n"
        "from megatron_rl.types import Task, Transcript\n"
        "pool = WorkerPool(2)\n"
        "item = (Task('0', '?'), Transcript('pid', 'stop', 3))\n"
        "print(*{int(r.reward) for r in pool.grade('faulty_graders:Faulty', {}, [item] * 8, 5.0, 0.0)}, flush=True)\n"
        "pool.grade('faulty_graders:Faulty', {}, [(item[0], Transcript('hang', 'stop', 4))], 5.0, 0.0)\n"
    )
    here = str(Path(__file__).parent)
    parent = subprocess.Popen([sys.executable, "-c", program, here], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert pids
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _wait_gone(pids)


def _wait_gone(pids: Collection[int]) -> None:
    """The kernel ends the workers after their parent has ended."""
    deadline = time.monotonic() + 10
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_alive, pids))


def _alive(pid: int) -> bool:
    """Whether the process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
