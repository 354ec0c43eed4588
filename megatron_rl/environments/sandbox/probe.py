"""Whether this machine enforces the limits: tried out, since a kernel may take a limit and ignore it."""

from __future__ import annotations

import functools

from megatron_rl.environments.sandbox.execution import execute
from megatron_rl.environments.sandbox.limits import Limits, SandboxUnavailable
from megatron_rl.environments.sandbox.plan import plan_for
from megatron_rl.errors import one_line

LIMITS = Limits(memory_mb=128, cpu_s=5, wall_s=30.0, disk_mb=4, file_mb=1, files=16, threads=4)
CHECKS = """
import os, resource, socket, threading, time

def fill(name, megabytes):
    with open(name, "wb", buffering=0) as file:
        for _ in range(megabytes):
            if file.write(bytes(2**20)) < 2**20:
                raise OSError

def threads():
    threading.stack_size(2**16)  # so that it is not the memory that runs out
    for _ in range(16):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()

def files():
    for number in range(64):
        open(f"file{number}", "x").close()

def disk():
    for number in range(8):
        fill(f"part{number}", 1)

def visible():
    if not {"proc", "sys", "home", "tmp", "run"} & set(os.listdir("/")):
        raise OSError

def privileges():
    os.setuid(0)

must_fail = {
    "memory": lambda: bytearray(2**28),
    "processes": lambda: os.fork() or os._exit(0),
    "threads": threads,
    "network": socket.socket,
    "file size": lambda: fill("large", 2),
    "disk": disk,
    "files": files,
    "file system": visible,
    "read-only": lambda: open("/dev/new", "x"),
    "privileges": privileges,
}
for name, attempt in must_fail.items():
    try:
        attempt()
    except (OSError, RuntimeError, MemoryError):
        continue
    print(name)
print("tried")
"""


def sandbox_problem() -> str:
    """Why this machine, or this process, has no sandbox, and what to do, in one line; "" where it has."""
    try:
        require_sandbox()
    except SandboxUnavailable as error:
        return one_line(str(error))
    return ""


@functools.cache
def require_sandbox() -> None:
    """``SandboxUnavailable`` unless the limits are enforced; a process tries it out until it finds that they are."""
    result = execute(plan_for(CHECKS, LIMITS), b"", LIMITS)
    *broken, last = result.stdout.splitlines() or [""]
    if last != "tried":
        raise SandboxUnavailable(f"the trial ended with {result.exit_code}: {one_line(result.stderr)}")
    if broken:
        named = ", ".join(broken)
        raise SandboxUnavailable(f"the kernel does not enforce {named}; use another machine, or another user")
