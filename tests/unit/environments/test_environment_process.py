"""The server as a child: started, killed, restarted, stopped, orphaned."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_rl.environments.client import EnvironmentClient
from megatron_rl.environments.process import EnvironmentServerProcess
from megatron_rl.environments.wire import read_address
from megatron_rl.errors import EnvironmentFault
from megatron_rl.types import Transcript

ROOT = Path(__file__).parents[3]


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "list.yaml"
    path.write_text("- environment: arithmetic\n  args: {train_tasks: 4}\n")
    return path


def wait_gone(pid: int, seconds: float = 60.0) -> None:
    """Waits until no process of that id runs; a zombie does not run."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.02)
    pytest.fail(f"process {pid} still runs")


def kill(process: EnvironmentServerProcess, number: int = signal.SIGKILL) -> None:
    """Kills the server and waits until another answers, or it was given up."""
    pid = process.pid
    os.kill(pid, number)
    wait_until(lambda: process.fault or process.pid not in (None, pid))


def wait_until(what: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_crashed_server_is_restarted_three_times_although_nobody_asks(config, tmp_path):
    """Another rank of the node may be the one that needs it."""
    with EnvironmentServerProcess(config, tmp_path) as process:
        assert process.restarts == 0
        for count in (1, 2, 3):
            before = read_address(process.address_file)
            kill(process, signal.SIGABRT)
            assert process.restarts == count
            assert read_address(process.address_file).token != before.token
            assert EnvironmentClient(process.address_file).health()
        kill(process, signal.SIGABRT)
        assert "after 3 restarts" in str(process.fault)
        with pytest.raises(EnvironmentFault, match="after 3 restarts"):
            EnvironmentClient(process.address_file).environments()


def test_a_healthy_server_may_be_killed_as_often_as_anyone_likes(config, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_rl.environments.process.MAX_RESTARTS", 1)
    with EnvironmentServerProcess(config, tmp_path) as process:
        for count in range(1, 5):
            kill(process, signal.SIGTERM if count % 2 else signal.SIGKILL)
            assert process.restarts == count


def test_restarts_are_counted_anew_after_some_time_of_health(config, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_rl.environments.process.HEALTHY_SECONDS", 0.0)
    monkeypatch.setattr("megatron_rl.environments.process.MAX_RESTARTS", 1)
    with EnvironmentServerProcess(config, tmp_path) as process:
        for count in (1, 2, 3):
            kill(process, signal.SIGABRT)
            assert process.restarts == count
        monkeypatch.setattr("megatron_rl.environments.process.HEALTHY_SECONDS", 1000.0)
        kill(process, signal.SIGABRT)
        assert process.fault


def test_a_server_that_dies_at_every_start_is_given_up_with_its_words(config, tmp_path):
    with EnvironmentServerProcess(config, tmp_path) as process:
        client = EnvironmentClient(process.address_file)
        task = client.fetch_tasks("arithmetic", "train")[0]
        config.write_text("- environment: arithmatic\n")
        os.kill(process.pid, signal.SIGABRT)
        [result] = asyncio.run(client.grade("arithmetic", [(task, Transcript("", "stop", 0))]))
        assert result.code == "server_unreachable"
        assert "after 3 restarts" in result.message
        assert "did you mean 'arithmetic'" in result.message
        assert process.restarts == 3


def test_a_server_that_is_killed_at_every_start_is_given_up(config, tmp_path, monkeypatch):
    """As the kernel does where it does not fit into memory: one that never answered is not restarted for ever."""
    stillborn = tmp_path / "python"
    stillborn.write_text("#!/bin/sh\nkill -9 $$\n")
    stillborn.chmod(0o755)
    with EnvironmentServerProcess(config, tmp_path) as process:
        monkeypatch.setattr(sys, "executable", str(stillborn))
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: process.fault or process.restarts > 10)
        assert process.restarts == 4 and "exited (-9) while it started" in str(process.fault)


def test_a_server_that_hangs_is_replaced(config, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_rl.environments.process.PROBE_SECONDS", 0.3)
    monkeypatch.setattr("megatron_rl.environments.process.HUNG_SECONDS", 2.0)
    with EnvironmentServerProcess(config, tmp_path) as process:
        kill(process, signal.SIGSTOP)
        assert process.restarts == 1
        assert EnvironmentClient(process.address_file).health()


def test_a_grade_survives_the_death_of_the_server(config, tmp_path):
    with EnvironmentServerProcess(config, tmp_path) as process:
        client = EnvironmentClient(process.address_file)
        task = client.fetch_tasks("arithmetic", "train")[0]
        os.kill(process.pid, signal.SIGKILL)
        answer = Transcript(f"#{task.data['answer']}", "stop", 2)
        [result] = asyncio.run(client.grade("arithmetic", [(task, answer)]))
        assert (result.failed, result.reward) == (False, 1.0)
        assert process.restarts == 1


def test_stop_leaves_nothing_behind(config, tmp_path):
    with EnvironmentServerProcess(config, tmp_path) as process:
        pid = process.pid
    assert not psutil.pid_exists(pid)
    assert not process.address_file.exists()


def test_signals_to_the_trainer_s_group_are_left_to_the_trainer(config, tmp_path):
    """Ctrl-C in a terminal reaches its foreground group, and torchrun passes SIGTERM to the group of every rank."""
    with EnvironmentServerProcess(config, tmp_path) as process:
        assert os.getpgid(process.pid) != os.getpgid(0)
        assert os.getsid(process.pid) != os.getsid(0)


@pytest.mark.parametrize("forks", [False, True])
def test_the_server_exits_with_its_parent(config, tmp_path, forks):
    """Also when a fork of the parent lives on."""
    script = (
        "import os, sys, time\n"
        "from megatron_rl.environments.process import EnvironmentServerProcess\n"
        f"process = EnvironmentServerProcess({str(config)!r}, {str(tmp_path)!r}).__enter__()\n"
        f"child = os.fork() if {forks} else -1\n"
        "if child == 0:\n"
        "    time.sleep(30)\n"
        "print(process.pid, child, flush=True)\n"
        "time.sleep(30)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    server, fork = map(int, parent.stdout.readline().split())
    assert psutil.pid_exists(server)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    try:
        wait_gone(server)
    finally:
        if fork > 0:
            os.kill(fork, signal.SIGKILL)


def test_a_port_in_use_is_one_clear_line(config, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentFault) as fault, EnvironmentServerProcess(config, tmp_path, port=port):
            pass
    _, *log = str(fault.value).splitlines()
    assert log == [f"error: cannot listen on 127.0.0.1:{port}: Address already in use; choose another"]


def test_a_wrong_list_is_reported_from_the_log(tmp_path):
    config = tmp_path / "list.yaml"
    config.write_text("- environment: arithmatic\n")
    did_you_mean = pytest.raises(EnvironmentFault, match="did you mean 'arithmetic'")
    with did_you_mean, EnvironmentServerProcess(config, tmp_path):
        pass


def test_it_starts_fast_without_torch_and_from_anywhere(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # must not be used for loopback
    with EnvironmentServerProcess(config, tmp_path) as process:
        assert sum(psutil.Process(process.pid).cpu_times()[:2]) < 2.0  # 0.4 s on an idle machine
        maps = Path(f"/proc/{process.pid}/maps")
        if maps.exists():
            assert "libtorch" not in maps.read_text()


def test_serve_alone_says_where_it_is_and_ends_on_control_c(config, tmp_path, monkeypatch):
    """As a person does it, from a terminal, with curl's options in a private file."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    terminal, stdin = pty.openpty()
    command = [sys.executable, "-m", "megatron_rl.environments", "serve", str(config)]
    server = subprocess.Popen(command, stdin=stdin, stderr=subprocess.PIPE, text=True)
    try:
        while " try: " not in (line := server.stderr.readline()):
            assert line, "it ended"
        curl = shlex.split(line.partition(" try: ")[2])
        options = Path(curl[2])
        assert stat.S_IMODE(options.stat().st_mode) == 0o600
        if shutil.which("curl"):
            answer = subprocess.run([*curl, "-s"], capture_output=True, text=True, check=True).stdout
            assert json.loads(answer)["items"][0]["name"] == "arithmetic"
        server.send_signal(signal.SIGINT)
        rest = server.stderr.read()
        assert server.wait(20) == 0
    finally:
        server.kill()
        os.close(terminal)
        os.close(stdin)
    assert "Traceback" not in rest
    assert rest.rstrip().endswith("stopped")
    assert not options.exists()
