"""Carries out a plan: starts the launcher, writes to it, reads no more than the limits allow, ends it in time."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_rl.environments.sandbox.plan import Limits, Plan, SandboxUnavailable, interpreter
from megatron_rl.errors import one_line

LAUNCHER = str(Path(__file__).with_name("launch.py"))
START_SECONDS = 60.0
"""For the sandbox itself, which takes a twentieth of a second on an idle machine."""
CHUNK = 2**16
ADVICE = (
    "allow user namespaces: on the host, sysctl user.max_user_namespaces above 0 and, where there is one, "
    "kernel.apparmor_restrict_unprivileged_userns=0; for a container, --security-opt seccomp=unconfined"
)

# of a traceback, also of numpy's own error; without one it is only what the program says
_OUT_OF_MEMORY = re.compile(r"(?:[\w.]+\._Array)?MemoryError(?::.*)?")


@dataclass(frozen=True)
class Execution:
    stdout: str
    """As UTF-8; bytes that are none become U+FFFD."""
    stderr: str
    exit_code: int
    """Minus the signal's number for a program that a signal ended, as ``subprocess`` has it."""
    why: str = ""
    """What it had too much of: ``timeout`` (wall time), ``cpu``, ``memory`` or ``output``; "" for all other ends.
    A full disk is an ``OSError`` that the program itself sees."""
    cpu_s: float = 0.0
    """Processor seconds of the program and of the processes that it waited for; 0 where it was ended from outside."""

    @property
    def succeeded(self) -> bool:
        """Return whether it came to its end without an error."""
        return self.exit_code == 0 and not self.why


def execute(plan: Plan, stdin: bytes, limits: Limits) -> Execution:
    """Run the program of a plan, which the kernel enforces; ``wall_s`` and ``output_kb`` are enforced here."""
    status, theirs = os.pipe()
    try:
        process = subprocess.Popen(
            [interpreter(), "-I", "-S", LAUNCHER, str(theirs)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            pass_fds=[theirs], env={}, cwd="/",
        )  # fmt: skip
    except OSError as error:
        os.close(status)
        raise SandboxUnavailable(f"its launcher cannot be started: {error}") from error
    finally:
        os.close(theirs)
    with process:
        try:
            watch = _Watch(process, status, plan.encoded() + stdin, limits)
            why = watch.run()
        finally:
            process.kill()  # and with it all others: each has PR_SET_PDEATHSIG
            os.close(status)
    return _outcome(watch, why, limits)


class _Watch:
    """The four pipes of a launcher."""

    def __init__(self, process: subprocess.Popen, status: int, given: bytes, limits: Limits) -> None:
        self.stdout, self.stderr, self._status, self.begun = bytearray(), bytearray(), bytearray(), False
        self._readers = {
            process.stdout.fileno(): self.stdout,
            process.stderr.fileno(): self.stderr,
            status: self._status,
        }
        self._stdin, self._given = process.stdin, memoryview(given)
        self._most, self._wall_s = limits.output_kb * 1024, limits.wall_s

    def run(self) -> str:
        """Read to the end and return "", or return why to end it before: ``timeout``, ``output``, ``start``."""
        ends = time.monotonic() + START_SECONDS
        os.set_blocking(self._stdin.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdin, selectors.EVENT_WRITE, self._write)
            for descriptor, stream in self._readers.items():
                selector.register(descriptor, selectors.EVENT_READ, partial(_read, descriptor, stream))
            open_readers = len(self._readers)
            while open_readers:
                for key, _ in selector.select(max(ends - time.monotonic(), 0.0)):
                    if not key.data():
                        selector.unregister(key.fileobj)
                        open_readers -= key.fileobj is not self._stdin
                if not self.begun and self._status.startswith(b"begun\n"):
                    self.begun, ends = True, time.monotonic() + self._wall_s
                if max(len(self.stdout), len(self.stderr)) > self._most:
                    return "output"
                if open_readers and time.monotonic() >= ends:
                    return "timeout" if self.begun else "start"
        return ""

    def status(self) -> dict[str, str]:
        """Return the launcher's lines on the program, by their first word."""
        lines = (line.partition(" ") for line in self._status.decode(errors="replace").splitlines())
        return {word: rest for word, _, rest in lines}

    def _write(self) -> bool:
        """Write a part; whether there is more. A program need not read its input."""
        with contextlib.suppress(BrokenPipeError):
            self._given = self._given[os.write(self._stdin.fileno(), self._given[:CHUNK]) :]
            if self._given:
                return True
        self._stdin.close()
        return False


def _read(descriptor: int, stream: bytearray) -> bool:
    """Read a part; whether there may be more."""
    part = os.read(descriptor, CHUNK)
    stream += part
    return bool(part)


def _outcome(watch: _Watch, why: str, limits: Limits) -> Execution:
    """What came of it; ``SandboxUnavailable`` where the program was never started."""
    status, most = watch.status(), limits.output_kb * 1024
    stdout, stderr = (bytes(stream[:most]).decode(errors="replace") for stream in (watch.stdout, watch.stderr))
    if "error" in status or not watch.begun:
        late = f"the sandbox was not ready within {START_SECONDS:g} s" if why == "start" else ""
        reason = status.get("error") or late or f"the launcher ended: {one_line(stderr)}"
        raise SandboxUnavailable(f"{reason}; {ADVICE}")
    if why or "ended" not in status:  # without that it was ended from outside
        return Execution(stdout, stderr, -signal.SIGKILL, why)
    code, seconds = status["ended"].split()
    exit_code, cpu_s = os.waitstatus_to_exitcode(int(code)), float(seconds)
    last = stderr.rstrip().rpartition("\n")[2]
    if exit_code == -signal.SIGXCPU or (exit_code == -signal.SIGKILL and cpu_s >= limits.cpu_s):
        why = "cpu"
    elif exit_code == 1 and "Traceback (most recent call last):\n" in stderr and _OUT_OF_MEMORY.fullmatch(last):
        why = "memory"
    return Execution(stdout, stderr, exit_code, why, cpu_s)
