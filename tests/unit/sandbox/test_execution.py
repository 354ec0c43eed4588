"""What comes of a program, and what is refused before one is run."""

from __future__ import annotations

import os
import platform
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_rl.environments.sandbox import (
    Limits,
    SandboxUnavailable,
    execution,
    python,
    python_tool,
    run_python,
    sandbox_problem,
)
from megatron_rl.environments.sandbox.plan import plan_for
from tests.unit.sandbox.mutants import LAUNCHER, PLAN

needs_sandbox = pytest.mark.skipif(bool(sandbox_problem()), reason=sandbox_problem())


KILLS = """
import contextlib, os
for process in (1, -1):
    for number in (2, 15, 9):
        with contextlib.suppress(OSError):
            os.kill(process, number)
exit(5)
"""
"""Of the first process, which is to tell how the program ended."""


@needs_sandbox
def test_what_goes_in_and_comes_out():
    code = "import sys\nprint(input(), '\u00e9')\nprint('wrong', file=sys.stderr)\nexit(3)"
    result = run_python(code, stdin="one\ntwo\n")
    assert (result.stdout, result.stderr, result.exit_code, result.why) == ("one \u00e9\n", "wrong\n", 3, "")
    assert 0 < result.cpu_s < 5 and not result.succeeded
    assert run_python("").succeeded


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM),
        ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import os; os._exit(7)", 7),
        ("import os; os.closerange(0, 99); os._exit(4)", 4),
        (KILLS, 5),
        ("syntax error", 1),
        ("exit('MemoryError')", 1),
        ("exit('MemoryError: not really')", 1),
        ("class MemoryErrorIsNear(Exception): pass\nraise MemoryErrorIsNear", 1),
        ("print('\\ud800')", 1),
        ("\x00", 1),
        ("\ud800", 1),
    ],
)
def test_how_it_ended(code, exit_code):
    result = run_python(code)
    assert (result.exit_code, result.why) == (exit_code, "")


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "limits", "why"),
    [
        ("import time; time.sleep(60)", Limits(wall_s=0.5), "timeout"),
        ("import signal\nsignal.pthread_sigmask(0, range(1, 65))\nsignal.sigwait([12])", Limits(wall_s=0.5), "timeout"),
        ("while True: pass", Limits(cpu_s=1, wall_s=300), "cpu"),
        ("x = [0]\nwhile True: x *= 2", Limits(memory_mb=128), "memory"),
        ("while True: print('x' * 999)", Limits(), "output"),
        ("import sys\nwhile True: print('x' * 999, file=sys.stderr)", Limits(), "output"),
    ],
)
def test_what_it_had_too_much_of(code, limits, why):
    result = run_python(code, limits=limits)
    assert result.why == why and result.exit_code != 0
    assert max(len(result.stdout), len(result.stderr)) <= limits.output_kb * 1024


@needs_sandbox
def test_just_as_much_as_it_may_print():
    limits = Limits(output_kb=64)
    assert run_python("print('x' * (2**16 - 1))", limits=limits).why == ""
    result = run_python("print('x' * 2**16)", limits=limits)
    assert (result.why, result.stdout) == ("output", "x" * 2**16)


@needs_sandbox
def test_input_that_nobody_reads_or_only_in_part():
    assert run_python("print(1)", stdin="x" * 2**22).stdout == "1\n"
    assert run_python("import sys; sys.stdin.close(); print(len(open('main.py').read()))", stdin="x" * 2**22).succeeded
    assert run_python("import sys; print(len(sys.stdin.read()))", stdin="x" * 2**22).stdout == f"{2**22}\n"


@needs_sandbox
def test_files_and_packages():
    files = {"data/a.txt": "text", "helper.py": "VALUE = 7", "raw": b"\xff"}
    code = "import helper\nopen('new', 'w').write('x')\nprint(open('data/a.txt').read(), helper.VALUE)"
    code += "\nprint(open('raw', 'rb').read())"
    assert run_python(code, files=files).stdout == "text 7\nb'\\xff'\n"
    assert "No module named 'numpy'" in run_python("import numpy").stderr
    assert run_python("import numpy; print(numpy.ones(2).sum())", packages=["numpy"]).stdout == "2.0\n"


@needs_sandbox
def test_threads_and_where_they_are_allowed_processes():
    code = "import threading\nthread = threading.Thread(target=print, args=(1,))\nthread.start(); thread.join()"
    assert run_python(code).stdout == "1\n"
    code = (
        "import subprocess, sys; print(subprocess.run([sys.executable, '-c', 'print(7)'], capture_output=True).stdout)"
    )
    assert run_python(code, limits=Limits(processes=2)).stdout == "b'7\\n'\n"
    assert "BlockingIOError" in run_python(code).stderr


@needs_sandbox
def test_as_many_threads_as_allowed():
    code = (
        "import threading, time\ncount = 0\ntry:\n    while True:\n"
        "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n        count += 1\n"
        "except RuntimeError:\n    print(count)"
    )
    assert int(run_python(code).stdout) == (32 if os.geteuid() else 34)


CAN_MOUNT = """
import ctypes
libc = ctypes.CDLL(None)
exit(libc.unshare(0x10020000) or libc.mount(b"x", b"/tmp", b"tmpfs", 0, None))
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="has no filter")
def test_a_machine_with_namespaces_has_a_sandbox():
    """A sandbox that is broken would otherwise have its whole suite skipped."""
    if subprocess.run([sys.executable, "-c", CAN_MOUNT], check=False).returncode:
        pytest.skip("this machine makes no user namespaces with mounts")
    assert sandbox_problem() == ""


@needs_sandbox
def test_several_at_once():
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda number: run_python(f"print({number})").stdout, range(24)))
    assert results == [f"{number}\n" for number in range(24)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"memory_mb": 0}, "memory_mb is 0; it must be a whole number above 0"),
        ({"memory_mb": 63}, "memory_mb is 63; Python itself needs 64"),
        ({"cpu_s": 0.5}, "cpu_s is 0.5; it must be a whole number"),
        ({"wall_s": float("nan")}, "wall_s is nan; it must be a number above 0"),
        ({"processes": True}, "processes is True"),
        ({"open_files": 7}, "open_files is 7"),
    ],
)
def test_limits_that_make_no_sense(given, message):
    with pytest.raises(ValueError, match=message):
        Limits(**given)


@pytest.mark.parametrize("name", ["", "/etc/x", "../x", "a/../../x", "a//b", "a\0b", "./x"])
def test_names_of_files_that_lead_elsewhere(name):
    with pytest.raises(ValueError, match="give a relative path"):
        run_python("", files={name: ""})


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["x" * 300], "no file can have it; give UTF-8 of at most 255 bytes"),
        (["\u00e9" * 128], "no file can have it"),
        (["a/" + "x" * 256 + "/b"], "no file can have it"),
        (["ab/" * 1500 + "c"], "at most 255 bytes, 4000 with its folders"),
        (["\ud800"], "no file can have it"),
        (["a", "a/b"], "files has 'a' and a file below it"),
        (["a/b/c", "a/b"], "files has 'a/b' and a file below it"),
        (["main.py/x"], "files has 'main.py' and a file below it"),
        (["."], "give a relative path"),
        (["a/" * 200 + "b"], "are 202 with folders"),
        ([f"{number}" for number in range(100)], "half of disk_mb"),
    ],
)
def test_files_that_cannot_be(names, message):
    """The caller's mistake: a sandbox that is not available would leave the sample out and blame the machine."""
    with pytest.raises(ValueError, match=message):
        run_python("", files=dict.fromkeys(names, "x" * 8000), limits=Limits(disk_mb=1))


def test_what_else_is_refused_as_a_value():
    with pytest.raises(ValueError, match="half of disk_mb"):
        run_python("", files={"x": b"x" * 2**20}, limits=Limits(disk_mb=1))
    for name in ("no_such_package", "../x", "sys"):
        with pytest.raises(ValueError, match="which is not installed"):
            run_python("", packages=[name])


def test_a_kernel_that_makes_no_namespaces(tmp_path, monkeypatch):
    launcher = tmp_path / "launcher.py"
    refusing = LAUNCHER.replace("LIBC.unshare,", "lambda flags: ctypes.set_errno(1) or -1,")
    assert refusing != LAUNCHER
    launcher.write_text(refusing, encoding="utf-8")
    python.require_sandbox.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(execution, "LAUNCHER", str(launcher))
        with pytest.raises(SandboxUnavailable) as raised:
            run_python("print(1)")
        assert sandbox_problem() == str(raised.value)
    message = (
        "code cannot be run safely here: [Errno 1] user and other namespaces (unshare): Operation not permitted; allow"
    )
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)


@needs_sandbox
def test_a_refusal_is_not_remembered():
    """A machine that was out of memory for a moment would otherwise mask all later samples of a process."""
    python.require_sandbox.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execution, "LAUNCHER", "/nonexistent")
        assert "No such file" in sandbox_problem()
    assert sandbox_problem() == ""


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ({"system": "Darwin"}, "needs Linux on x86_64 or aarch64, and this is Darwin"),
        ({"machine": "riscv64"}, "this is Linux on riscv64"),
        ({"release": "5.10.0-33-amd64"}, "needs Linux 5.14 or later, and this is 5.10.0-33-amd64"),
    ],
)
def test_machines_that_are_not_known(machine, message, monkeypatch):
    for name, value in machine.items():
        monkeypatch.setattr(f"platform.{name}", lambda value=value: value)
    with pytest.raises(SandboxUnavailable, match=message):
        run_python("print(1)")


@needs_sandbox
@pytest.mark.parametrize(
    ("without", "named"),
    [
        ("RLIMIT_AS", "memory"),
        ("RLIMIT_NPROC", "threads"),
        ("RLIMIT_FSIZE", "file size"),
        ("disk", "disk"),
        ("inodes", "files"),
    ],
)
def test_a_kernel_that_ignores_a_limit_is_found_out(without, named, monkeypatch):
    """As one does where root of a user namespace is root outside, too: RLIMIT_NPROC is not for him."""
    monkeypatch.setattr(python, "plan_for", lambda *given: PLAN[without](plan_for(*given)))
    python.require_sandbox.cache_clear()
    message = (
        f"code cannot be run safely here: the kernel does not enforce {named}; use another machine, or another user"
    )
    assert sandbox_problem() == message
    with pytest.raises(SandboxUnavailable, match=named):
        run_python("print(1)")


def test_limits_above_those_of_the_process_itself():
    code = (
        "import resource\nfrom megatron_rl.environments.sandbox import run_python, SandboxUnavailable\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))\n"
        "try: run_python('')\nexcept SandboxUnavailable as error: print(error)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "RLIMIT_NOFILE of this process is 32, and the limits ask for 64; ask for less, or raise it" in ended.stdout


def test_nothing_is_left_open():
    before = os.listdir("/proc/self/fd")
    for code in ("print(1)", "while True: print(1)"):
        run_python(code)
    with pytest.raises(ValueError, match="give a relative"):
        run_python("", files={"/": ""})
    assert os.listdir("/proc/self/fd") == before
    assert resource.getrlimit(resource.RLIMIT_CORE) is not None


@needs_sandbox
def test_the_tool():
    schema, call = python_tool(Limits(wall_s=60), max_characters=200)
    assert schema["function"]["name"] == "python"
    assert schema["function"]["parameters"]["required"] == ["code"]
    assert call("print(6 * 7)") == "42"
    assert call("x = 1") == "[it printed nothing]"
    failed = call("print(1)\n1/0")
    assert failed.startswith("1\nTraceback") and failed.endswith("ZeroDivisionError: division by zero")
    assert python_tool(Limits(wall_s=1))[1]("import time; time.sleep(99)") == "[it was ended after 1 s]"
    assert call("exit(2)") == "[it ended with status 2]"
    assert call("print('a' * 300)") == f"{100 * 'a'}\n[100 characters are left out]\n{100 * 'a'}"
