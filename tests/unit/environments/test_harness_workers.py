"""Harnesses in worker processes: whatever a sample does, it costs no other one its reward and leaves nothing behind."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from megatron_rl.environments import child
from megatron_rl.environments.sandbox import sandbox_problem
from megatron_rl.environments.selftest import always, script_of, scripted_model
from megatron_rl.environments.workers import WorkerPool
from megatron_rl.errors import EnvironmentFault
from megatron_rl.types import Grade, HarnessRun, Task
from tests.unit.environments.conftest import is_gone

TALK, AWAITS = "harnesses:Talk", "harnesses:Awaits"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the pool's directories are made."""
    folder = tmp_path_factory.mktemp("scratch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        yield folder


@pytest.fixture(scope="module")
def pool(hostile_path: None, scratch: Path) -> Iterator[WorkerPool]:
    with contextlib.closing(WorkerPool.for_harnesses(8, [(TALK, {}), (AWAITS, {})])) as pool:
        yield pool


@pytest.fixture(scope="module")
def model() -> Iterator[str]:
    """A model that says 1."""
    with scripted_model(always("1")) as url:
        yield url


def sample(url: str, fault: str = "", mark: Path | str = "", number: int = 0) -> HarnessRun:
    data = {"fault": fault, "mark": str(mark), "cwd": os.getcwd()}
    return HarnessRun(Task("0", "?", data), number, url, f"key-{number}-of-a-session")


def run(pool: WorkerPool, *runs: HarnessRun, reference: str = TALK, deadline_s: float = 60.0, **options) -> list[Grade]:
    return pool.run(reference, options, runs, deadline_s, lambda: False)


def test_a_harness_in_a_file_is_found_from_the_directory_of_its_sample(scratch, model):
    path = os.path.relpath(Path(__file__).parent / "harnesses.py")
    with contextlib.closing(WorkerPool.for_harnesses(1, [(f"{path}:Talk", {})])) as pool:
        (result,) = run(pool, sample(model), reference=f"{path}:Talk")
    assert result.reward == 1.0, result.message


def test_a_harness_is_paid_for_what_the_model_says(pool, model):
    results = run(pool, *(sample(model, number=number) for number in range(20)), bonus=0.5)
    assert [result.reward for result in results] == [1.5] * 20


def test_an_asynchronous_harness_gets_an_asynchronous_client(pool, model):
    assert run(pool, sample(model), reference=AWAITS)[0].reward == 2.0


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("raise", "environment_exception", "ValueError: no luck with [key] (harnesses.py:"),
        ("quit", "environment_exception", "SystemExit: 3 (harnesses.py:"),
        ("kill", "worker_died", "killed by SIGKILL"),
        ("exit", "worker_died", "exited with status 7"),
        ("memory", "worker_died", "exited with status 99"),
        ("nan", "invalid_reward", "nan"),
        ("text", "invalid_reward", "'much'"),
        ("none", "invalid_reward", "None"),
    ],
)
def test_a_sample_that_goes_wrong_is_masked_with_the_reason(pool, model, fault, code, said):
    good, bad, last = run(pool, sample(model), sample(model, fault), sample(model))
    assert (good.reward, last.reward) == (1.0, 1.0)
    assert (bad.reward, bad.code) == (None, code)
    assert said in bad.message


def test_a_key_at_the_end_of_a_long_text_is_replaced_before_the_cut(pool, model):
    raised, shown = run(pool, sample(model, "quote"), sample(model, "extract"))
    assert (raised.message[-5:], shown.extracted[-5:]) == ("xx[ke", "xx[ke")


def test_a_refused_call_is_shown_with_the_authors_line(pool):
    with scripted_model(script_of(["1"])) as url:
        (first,), (second,) = run(pool, sample(url)), run(pool, sample(url))
    assert first.reward == 1.0
    assert second.code == "environment_exception"
    assert "the script ends after 1 turns" in second.message and "(harnesses.py:" in second.message


def test_nothing_is_run_twice(pool, model, tmp_path):
    mark = tmp_path / "mark"
    (result,) = run(pool, sample(model, "count", mark))
    assert result.code == "worker_died"
    assert mark.read_text() == "ran\n"


class Overloaded(BaseHTTPRequestHandler):
    """Answers what an OpenAI client would try again."""

    calls: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        """One call."""
        self.calls.append(self.path)
        self.send_error(503)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def test_a_call_is_made_once_whatever_the_endpoint_answers(pool):
    with ThreadingHTTPServer(("127.0.0.1", 0), Overloaded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (result,) = run(pool, sample(f"http://127.0.0.1:{server.server_port}/v1"))
        server.shutdown()
    assert (result.code, Overloaded.calls) == ("environment_exception", ["/v1/chat/completions"])
    assert "InternalServerError" in result.message


def test_a_sample_that_hangs_is_killed_with_what_it_started(pool, model, scratch, tmp_path):
    mark = tmp_path / "mark"
    late, good = run(pool, sample(model, "hang", mark), sample(model), deadline_s=5.0)
    assert (late.code, late.message, good.reward) == ("timeout", "no reward within 5 s", 1.0)
    assert all(is_gone(int(pid)) for pid in mark.read_text().split())  # one in a session of its own
    assert in_use(scratch) == []


def in_use(scratch: Path) -> list[Path]:
    """The directories of samples."""
    return [path for pool in scratch.iterdir() for path in pool.iterdir()]


def test_a_daemon_ends_with_its_sample(pool, model, tmp_path):
    mark = tmp_path / "mark"
    (result,) = run(pool, sample(model, "daemon", mark))
    assert result.reward == 1.0
    assert is_gone(int(mark.read_text()))


def test_a_daemon_of_a_sample_that_runs_is_left_alone(pool, model, tmp_path):
    mark = tmp_path / "mark"
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        asked = thread.submit(run, pool, sample(model, "keeps", mark))
        while not (mark.exists() and mark.read_text()):
            assert not asked.done()
            time.sleep(0.02)
        assert run(pool, sample(model))[0].reward == 1.0
        mark.unlink()
        assert asked.result()[0].reward == 1.0


@pytest.mark.parametrize("listed", [child.CHILDREN, "/nonexistent"])
def test_orphans_are_found_whatever_the_kernel_lists(listed):
    code = (
        "import subprocess; from megatron_rl.environments import child\n"
        f"child.CHILDREN = {listed!r}\n"
        "known, orphan = (subprocess.Popen(['sleep', '600'], start_new_session=True) for _ in range(2))\n"
        "child.kill_orphans({known.pid})\n"
        "print(known.poll() is None, orphan.pid)\n"
        "known.kill()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    alive, orphan = done.stdout.split()
    assert alive == "True" and is_gone(int(orphan))


def test_the_directory_of_a_sample_is_its_own_and_removed(pool, model, scratch, tmp_path):
    marks = [tmp_path / "a", tmp_path / "b"]
    results = run(pool, *(sample(model, "files", mark) for mark in marks))
    assert [result.reward for result in results] == [1.0, 1.0]
    folders = {mark.read_text() for mark in marks}
    assert len(folders) == 2 and all(Path(folder).is_relative_to(scratch) for folder in folders)
    assert in_use(scratch) == []


def test_a_sample_sees_no_key_but_that_of_its_client(pool, model):
    results = run(pool, *(sample(model, "place", number=number) for number in range(30)))
    assert all(result.metrics == {"own": 1.0, "seen": 0.0, "patient": 1.0} for result in results)


def test_a_live_object_lasts_as_long_as_the_sample(pool):
    turns = ["total = 1", "total += 2", "print(total * 2)"] * 3
    with scripted_model(script_of(turns)) as url:
        results = [run(pool, sample(url, "live"))[0] for _ in range(3)]
    assert [result.reward for result in results] == [6.0] * 3


@pytest.mark.skipif(bool(sandbox_problem()), reason=sandbox_problem())
def test_a_harness_runs_what_the_model_writes_in_a_sandbox(pool, model):
    assert [result.reward for result in run(pool, *[sample(model, "sandbox")] * 3)] == [2.0] * 3


def test_a_deadline_begins_with_the_process(hostile_path, model, tmp_path):
    with contextlib.closing(WorkerPool.for_harnesses(1, [(TALK, {})])) as one:
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            first = thread.submit(run, one, sample(model, "sleep", tmp_path / "mark"))
            while not (tmp_path / "mark").exists():
                assert not first.done()
                time.sleep(0.02)
            (second,) = run(one, sample(model), deadline_s=6.0)
        assert (first.result()[0].reward, second.reward) == (1.0, 1.0)


def test_samples_nobody_waits_for_are_killed(hostile_path, model, tmp_path):
    mark = tmp_path / "mark"
    with contextlib.closing(WorkerPool.for_harnesses(1, [(TALK, {})])) as one:
        runs = [sample(model, "hang", mark), sample(model, "count", mark)]  # the second waits for a process
        assert one.run(TALK, {}, runs, 60.0, lambda: bool(mark.exists() and mark.read_text())) == []
        assert run(one, sample(model))[0].reward == 1.0  # the process is free again
        assert all(is_gone(int(pid)) for pid in mark.read_text().split())
        assert (one.counters()["runs_cancelled"], one.counters()["runs"]) == (2, 1)


@pytest.mark.parametrize("how", ["close", "kill"])
def test_nothing_outlives_its_pool(hostile_path, model, tmp_path, monkeypatch, how):
    scratch, mark = tmp_path / "scratch", tmp_path / "mark"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    pool = WorkerPool.for_harnesses(2, [(TALK, {})])
    with concurrent.futures.ThreadPoolExecutor(1) as thread, contextlib.closing(pool):
        asked = thread.submit(run, pool, sample(model, "hang", mark))
        while not (mark.exists() and mark.read_text()):
            assert not asked.done()
            time.sleep(0.02)
        worker, started = map(int, mark.read_text().split())
        if how == "close":
            pool.close()
        else:
            psutil.Process(worker).parent().kill()
        with pytest.raises(EnvironmentFault):
            asked.result()
        assert is_gone(worker)
        if how == "close":
            assert is_gone(started) and list(scratch.iterdir()) == []
        else:  # of a process that was killed, nobody knows what its samples had started elsewhere
            psutil.Process(started).kill()
            assert run(pool, sample(model))[0].reward == 1.0
            assert len(list(scratch.iterdir())) == 1  # that of the process in its place


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.long
def test_64_processes_of_which_some_hang_and_some_die_lose_no_other_reward(hostile_path, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    faults, present = {3: "hang", 7: "kill"}, psutil.Process().children()  # of every ten
    with contextlib.closing(WorkerPool.for_harnesses(64, [(TALK, {})])) as pool, scripted_model(always("1")) as url:
        assert run(pool, sample(url))[0].reward == 1.0
        (fork_server,) = (each for each in psutil.Process().children() if each not in present)
        before = descriptors(fork_server.pid), descriptors(os.getpid())
        runs = [sample(url, faults.get(n % 10, ""), tmp_path / f"mark-{n}", n) for n in range(200)]
        results = run(pool, *runs, deadline_s=15.0)
        wanted = {"hang": (None, "timeout"), "kill": (None, "worker_died"), "": (1.0, "")}
        found = [(result.reward, result.code) for result in results]
        assert found == [wanted[run.task.data["fault"]] for run in runs]
        assert fork_server.children(recursive=True) == []
        assert [list(path.iterdir()) for path in tmp_path.iterdir() if path.is_dir()] == [[]]
        assert descriptors(fork_server.pid) == before[0]
        assert descriptors(os.getpid()) <= before[1], "what earlier tests left may have been collected"
