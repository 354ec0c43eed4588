"""What a program tries, it must not reach; and it must reach it where the protection against it is taken away."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megatron_rl.environments.sandbox import Limits, sandbox_problem
from megatron_rl.environments.sandbox.plan import interpreter
from tests.unit.sandbox.attempts import ATTEMPTS, CALLS, DAEMON, SEVERAL, Attempt, call
from tests.unit.sandbox.mutants import LAUNCHER, TEXT, run

pytestmark = pytest.mark.skipif(bool(sandbox_problem()), reason=sandbox_problem())
NOBODY = 65534
TOKEN = f"sandbox-test-{os.getpid()}"


@pytest.fixture(scope="module")
def outside() -> Iterator[dict[str, object]]:
    """Things of this machine that a program is after; all of them may be reached by any user."""
    libc = ctypes.CDLL(None, use_errno=True)
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    with contextlib.ExitStack() as stack:
        if os.geteuid() == 0:
            stack.callback(os.setgroups, os.getgroups())
            os.setgroups([0])
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o777)
        secret = folder / "token"
        secret.write_text("secret")
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        named, abstract = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        named.bind(str(folder / "socket"))
        (folder / "socket").chmod(0o777)
        abstract.bind(f"\0{TOKEN}")
        for each in (named, abstract):
            each.listen(16)
        sleeper = subprocess.Popen(["/bin/sleep", "600"], env={"SECRET": "secret"}, **user)
        stack.callback(sleeper.wait)
        stack.callback(sleeper.kill)
        key = 0x5AFE0000 + os.getpid() % 0xFFFF
        shared = libc.shmget(key, 4096, 0o1666)
        stack.callback(libc.shmctl, shared, 0, None)
        shown = folder / "shown"
        shown.mkdir()
        shown.chmod(0o777)
        shutil.copy(interpreter(), shown / "root")
        (shown / "root").chmod(0o4755)
        (shown / "private").touch(0o600)
        yield {
            "SECRET_FILE": str(secret), "PROCESS": sleeper.pid, "TCP_PORT": tcp.getsockname()[1],
            "SOCKET": str(folder / "socket"), "ABSTRACT": TOKEN, "SHARED_KEY": key, "TOKEN": TOKEN, "SHOWN": str(shown),
        }  # fmt: skip


def tried(attempt: Attempt, without, outside, tmp_path, patch) -> str:
    """What the attempt printed."""
    if attempt.only not in ("", "user" if os.geteuid() else "root"):
        pytest.skip(f"only {attempt.only} has this to lose")
    given = "".join(f"{name} = {value!r}\n" for name, value in outside.items())
    result = run(given + attempt.code, attempt.limits, without, tmp_path, patch, [(outside["SHOWN"], "/shown")])
    return result.stdout + result.stderr


@pytest.mark.parametrize("name", ATTEMPTS)
def test_it_fails(name, outside, tmp_path, monkeypatch):
    assert "ESCAPED\n" not in tried(ATTEMPTS[name], (), outside, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", ATTEMPTS)
def test_it_succeeds_without_the_protection(name, outside, tmp_path, monkeypatch):
    attempt = ATTEMPTS[name]
    assert "ESCAPED\n" in tried(attempt, attempt.without, outside, tmp_path, monkeypatch)


@pytest.mark.parametrize("without", [(), ("filter",)], ids=["filter", "no filter"])
@pytest.mark.parametrize("name", CALLS)
def test_calls_of_the_kernel(name, without, tmp_path, monkeypatch):
    *numbers, arguments = CALLS[name]
    code = call(f"{numbers[platform.machine() == 'aarch64']}, {arguments}")
    result = run(code, Limits(), without, tmp_path, monkeypatch)
    assert result.exit_code == 0
    assert ("ESCAPED" in result.stdout) == bool(without)


def left_over() -> list[psutil.Process]:
    """Processes outside that have the token among their arguments."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if TOKEN in process.cmdline():
                found.append(process)
    return found


def come_to(count: int, seconds: float = 120.0) -> bool:
    """Whether there are so many of them in the end: a new process, and a killed one, take their time."""
    end = time.monotonic() + seconds
    while len(left_over()) != count:
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("without", [(), ("process",)], ids=["namespace", "no namespace"])
def test_a_daemon_does_not_outlive_its_program(without, tmp_path, monkeypatch):
    result = run(f"TOKEN = {TOKEN!r}\n{DAEMON}", SEVERAL, without, tmp_path, monkeypatch)
    assert result.exit_code == 0
    try:
        assert come_to(1 if without else 0)
    finally:
        for process in left_over():
            process.kill()


CALLER = """
import sys
from megatron_rl.environments.sandbox import execution, run_python
execution.LAUNCHER = sys.argv[2]
token = sys.argv[1].removeprefix("not ")
run_python(f"import os, sys, time\\nprint(flush=True)\\nos.execv(sys.executable, "
           f"[sys.executable, '-S', '-c', 'import time; time.sleep(600)', '{token}'])")
"""


@pytest.mark.parametrize("bound", [True, False])
def test_a_program_ends_with_its_caller(bound, tmp_path):
    launcher = tmp_path / "launcher.py"
    launcher.write_text(LAUNCHER if bound else LAUNCHER.replace(*TEXT["die with parent"]), encoding="utf-8")
    caller = subprocess.Popen([sys.executable, "-c", CALLER, f"not {TOKEN}", str(launcher)])
    # The program alone has the token: a process that the caller forks has the caller's arguments until its exec.
    assert come_to(1)
    (program,) = left_over()
    score = Path(f"/proc/{program.pid}/oom_score_adj").read_text().strip()
    assert score == "1000"  # the first to go when memory runs out
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    try:
        assert come_to(0, seconds=120 if bound else 2) == bound
    finally:
        for process in left_over():
            process.kill()
