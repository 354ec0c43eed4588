"""What a run would do to the server, and what nobody should: killed again and again, hammered, asked meanwhile."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from megatron_rl.environments.client import EnvironmentClient
from megatron_rl.environments.process import EnvironmentCounters, EnvironmentServerProcess
from megatron_rl.environments.wire import Address, read_address, write_address
from megatron_rl.types import Task, Transcript

HERE = Path(__file__).parent
GROUP = 4


class Killer(threading.Thread):
    """Kills the server ``times`` times, each at a random moment after it has answered."""

    def __init__(self, process: EnvironmentServerProcess, times: int) -> None:
        super().__init__(daemon=True)
        self._process, self._times = process, times
        self.kills = 0
        self.finished = threading.Event()

    def run(self) -> None:
        source = random.Random(7)
        last = None
        while self.kills < self._times:
            time.sleep(source.uniform(0.0, 0.3))
            pid = self._process.pid
            if pid is None or pid == last or not self._healthy():
                continue
            os.kill(pid, signal.SIGKILL)
            last, self.kills = pid, self.kills + 1
        self.finished.set()

    def _healthy(self) -> bool:
        return EnvironmentClient(self._process.address_file).health()


def _samples(number: int) -> list[tuple[Task, Transcript]]:
    """A group: right and wrong answers, and in some groups one that kills its worker once or always."""
    texts = ["ok" * (number % 7), f"answer {number}", "x"]
    texts.append({0: "segv", 5: "raises"}.get(number % 10, "last"))
    return [(Task(f"task-{number}", "?"), Transcript(text, "stop", len(text))) for text in texts]


async def _graded(client: EnvironmentClient, stop: threading.Event, least: int) -> Counter:
    """(task, text, failed, code, reward) of every sample of at least ``least`` groups and until ``stop``."""
    seen: Counter = Counter()

    async def one(number: int) -> None:
        items = _samples(number)
        results = await client.grade("faulty", items)
        assert len(results) == GROUP
        for (task, transcript), result in zip(items, results, strict=True):
            seen[(task.id, transcript.text, result.failed, result.code, result.reward)] += 1

    number = 0
    while number < least or not stop.is_set():
        await asyncio.gather(*[one(number + offset) for offset in range(8)])
        number += 8
    return seen


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.long)])
def test_a_server_that_is_killed_again_and_again_loses_and_doubles_nothing(hostile_path, tmp_path, kills):
    config = tmp_path / "list.yaml"
    config.write_text("- environment: faulty_graders:Faulty\n")
    with EnvironmentServerProcess(config, tmp_path) as process:
        client = EnvironmentClient(process.address_file)
        counters = EnvironmentCounters(client, process)
        killer = Killer(process, kills)
        killer.start()
        disturbed = asyncio.run(_graded(client, killer.finished, 40))
        assert killer.kills == process.restarts == kills
        counted = counters.since_last_call()
        assert counted["restarts"] == kills
        assert counted["requests_repeated"] >= kills // 2
        done = threading.Event()
        done.set()
        groups = sum(disturbed.values()) // GROUP
        plain = asyncio.run(_graded(EnvironmentClient(process.address_file), done, groups))
    assert disturbed == plain
    assert set(disturbed.values()) == {1}
    codes = Counter(code for _, _, _, code, _ in disturbed)
    assert set(codes) == {"", "worker_died"}
    assert codes["worker_died"] == sum(number % 10 == 0 for number in range(groups))


POLLER = """
import http.client, json, sys, time
host, seconds = sys.argv[1], float(sys.argv[2])
times, end = [], time.monotonic() + seconds
while time.monotonic() < end:
    begin = time.perf_counter()
    connection = http.client.HTTPConnection(host, timeout=30)
    connection.request("GET", "/v1/health")
    assert connection.getresponse().status == 200
    connection.close()
    times.append(time.perf_counter() - begin)
    time.sleep(0.02)
print(json.dumps(times))
"""


def test_the_health_route_answers_under_every_load(hostile_path, tmp_path):
    """Graders that hang, graders in process, and bodies of a megabyte; asked from a process of its own."""
    config = tmp_path / "list.yaml"
    config.write_text(
        "- environment: faulty_graders:Faulty\n- environment: arithmetic\n  args: {train_tasks: 4, test_tasks: 4}\n"
    )
    with EnvironmentServerProcess(config, tmp_path) as process:
        address = read_address(process.address_file)
        stop = threading.Event()
        statuses: Counter = Counter()
        kinds = [_hanging] * 72 + [_arithmetic] * 8 + [_large] * 2
        threads = [
            threading.Thread(target=_hammer, args=(address, kind, stop, statuses), daemon=True) for kind in kinds
        ]
        for thread in threads:
            thread.start()
        command = [sys.executable, "-c", POLLER, urlsplit(address.url).netloc, "1.5"]
        polls = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(3)]
        stop.set()
        windows = [json.loads(polled.stdout) for polled in polls]
        times = [seconds for window in windows for seconds in window]
        print(f"{len(times)} answers, median {statistics.median(times):.3f} s, longest {max(times):.3f} s")
        assert process.restarts == 0
    assert statuses[429] > 0
    assert statuses[500] == statuses["lost"] == 0
    assert statistics.median(times) < 0.1
    # other processes of a shared machine may hold all of this up once, the server's own load would in every window
    assert min(map(max, windows)) < 1.0


def _body(text: str) -> bytes:
    item = {
        "task": {"id": "t", "prompt": "?", "data": {"answer": 4}},
        "transcript": {"text": text, "finish_reason": "stop", "num_tokens": 3},
    }
    return json.dumps({"items": [item] * 16}).encode()


def _hanging() -> tuple[str, bytes]:
    return "faulty", _body("hang")


def _arithmetic() -> tuple[str, bytes]:
    return "arithmetic", _body("4")


def _large() -> tuple[str, bytes]:
    return "arithmetic", _body('x, {"é" \n' * 70_000)


def _hammer(address: Address, make, stop: threading.Event, statuses: Counter) -> None:
    while not stop.is_set():
        name, body = make()
        connection = http.client.HTTPConnection(urlsplit(address.url).netloc, timeout=60)
        headers = {"Authorization": f"Bearer {address.token}"}
        try:
            connection.request("POST", f"/v1/environments/{name}/grade", body, headers)
            statuses[connection.getresponse().status] += 1
        except (OSError, http.client.HTTPException):
            statuses["lost"] += not stop.is_set()
        finally:
            connection.close()


def test_an_environment_that_ends_the_fork_server_is_the_server_s_fault_and_nobody_else_s(tmp_path, monkeypatch):
    """It answers 503: the samples cannot be graded, and none of them is to blame."""
    (tmp_path / "fatal.py").write_text(
        "import os, sys\n"
        "from megatron_rl.environments.base import Environment\n"
        "from megatron_rl.types import Task\n"
        "if sys.argv[0].endswith('worker.py'):\n"
        "    os._exit(1)\n"
        "class Fatal(Environment):\n"
        "    '''Ends every process that could grade it.'''\n"
        "    name = 'fatal'\n"
        "    def tasks(self, split):\n"
        "        yield Task('0', '?')\n"
        "    def grade(self, task, transcript):\n"
        "        return 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("megatron_rl.environments.client.PATIENCE_TIMEOUTS", 0.05)
    config = tmp_path / "list.yaml"
    config.write_text("- environment: fatal:Fatal\n- environment: arithmetic\n  args: {train_tasks: 4}\n")
    with EnvironmentServerProcess(config, tmp_path) as process:
        client = EnvironmentClient(process.address_file)
        item = (Task("train-0", "?", {"answer": 4}), Transcript("#4", "stop", 2))
        [result] = asyncio.run(client.grade("fatal", [item]))
        assert result.code == "server_unreachable"
        assert "the process of the grading workers ended" in result.message
        assert not asyncio.run(client.grade("arithmetic", [item]))[0].failed
        assert process.restarts == 0


def test_a_unix_socket_is_private_and_works_like_a_port(tmp_path):
    config = tmp_path / "list.yaml"
    config.write_text("- environment: arithmetic\n  args: {train_tasks: 4}\n")
    path, address_file = tmp_path / "socket", tmp_path / "address.json"
    path.touch()
    command = [sys.executable, "-m", "megatron_rl.environments", "serve", str(config)]
    command += ["--unix-socket", str(path), "--address-file", str(address_file)]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert (refused.returncode, "Address already in use" in refused.stderr) == (1, True)
    path.unlink()
    for end in (signal.SIGKILL, signal.SIGTERM):  # the second finds what the first, killed, has left
        address_file.unlink(missing_ok=True)
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        client = EnvironmentClient(address_file)
        assert len(client.fetch_tasks("arithmetic", "train")) == 4
        assert read_address(address_file).url == f"unix:{path}"
        assert path.stat().st_mode & 0o777 == 0o600
        task = client.fetch_tasks("arithmetic", "train")[0]
        answer = Transcript(f"#{task.data['answer']}", "stop", 2)
        assert asyncio.run(client.grade("arithmetic", [(task, answer)]))[0].reward == 1.0
        assert client.server_counters()[0] == server.pid
        refused = subprocess.run(command, capture_output=True, text=True)
        assert (refused.returncode, "Address already in use" in refused.stderr) == (1, True)
        assert client.health()
        server.send_signal(end)
        server.wait()
        assert address_file.exists() == (end == signal.SIGKILL)


def test_a_socket_path_that_is_too_long_is_one_clear_line(tmp_path):
    config = tmp_path / "list.yaml"
    config.write_text("- environment: arithmetic\n")
    command = [sys.executable, "-m", "megatron_rl.environments", "serve", str(config)]
    done = subprocess.run([*command, "--unix-socket", "/tmp/" + "x" * 120], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("AF_UNIX path too long; choose another")
    write_address(tmp_path / "address.json", Address("unix:/nowhere/socket", "t", 1))
    assert not EnvironmentClient(tmp_path / "address.json").health()


def test_grades_that_hang_cost_no_other_sample_a_grade(hostile_path, tmp_path):
    """Eight of them hold the two to four workers for longer than the timeout of the groups that wait behind them."""
    (tmp_path / "list.yaml").write_text("- environment: faulty_graders:Faulty\n  grade_deadline: 0.5\n")
    with EnvironmentServerProcess(tmp_path / "list.yaml", tmp_path) as process:
        client = EnvironmentClient(process.address_file, timeout=2.2)
        texts = ["hang" if number % 4 == 0 else "good" for number in range(32)]
        items = [(Task(str(number), "?"), Transcript(text, "stop", 4)) for number, text in enumerate(texts)]

        async def groups():
            return await asyncio.gather(*[client.grade("faulty", items[at : at + 4]) for at in range(0, 32, 4)])

        grades = [grade for group in asyncio.run(groups()) for grade in group]
    assert [grade.status for grade in grades] == ["timeout" if text == "hang" else "correct" for text in texts]
