"""A Python in a sandbox of its own: one program, the same as a tool that a model calls, and a trial of the machine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_rl.environments.sandbox.execution import Execution, execute
from megatron_rl.environments.sandbox.plan import Limits, SandboxUnavailable, plan_for
from megatron_rl.errors import one_line

MAX_CHARACTERS = 4_000
"""Of an answer: what a model reads costs its context."""
LIMITS = Limits(cpu_s=3, wall_s=4.0)
"""Of a call: a step of an environment has 5 seconds, with the sandbox's own start."""
TRIAL_LIMITS = Limits(memory_mb=128, cpu_s=5, wall_s=30.0, disk_mb=4, file_mb=1, files=16, threads=4)
TRIAL = """
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


def run_python(
    code: str,
    stdin: str = "",
    limits: Limits | None = None,
    files: Mapping[str, str | bytes] | None = None,
    packages: Sequence[str] = (),
) -> Execution:
    """Run ``code`` in a fresh Python in a sandbox of its own, and wait for it.

    Args:
        code: the program; it is ``main.py`` in its own directory, the only place that it can write to.
        stdin: what it reads.
        limits: what it may use; the defaults of ``Limits`` without.
        files: contents by relative path, put into its directory first.
        packages: installed packages that it can import, besides the standard library: ``["numpy"]``.

    Raises:
        SandboxUnavailable: this machine or process cannot enforce the limits; nothing was run.
        ValueError: ``files`` or ``packages`` has a name that cannot be.
    """
    limits = limits or Limits()
    plan = plan_for(code, limits, files, packages)
    require_sandbox()
    return execute(plan, stdin.encode(errors="replace"), limits)


def python_tool(
    limits: Limits = LIMITS, *, packages: Sequence[str] = (), max_characters: int = MAX_CHARACTERS
) -> tuple[dict[str, Any], Callable[[str], str]]:
    """Return the tool ``python``: its schema as in OpenAI's API, and the function from code to what a model reads.

    Each call is a program of its own: no variable and no file outlives it. The function raises
    ``SandboxUnavailable`` where the machine has no sandbox; whatever the code does becomes text.
    """
    about = "Runs a Python program in a fresh interpreter and returns what it prints. Nothing is kept between calls"
    about += f"; it may import {', '.join(packages)}." if packages else "; it has the standard library."
    code = {"type": "string", "description": "The program. Only what it prints is returned."}
    parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}
    schema = {"type": "function", "function": {"name": "python", "description": about, "parameters": parameters}}

    def call(code: str) -> str:
        return shown(run_python(code, limits=limits, packages=packages), limits, max_characters)

    return schema, call


def shown(result: Execution, limits: Limits, max_characters: int = MAX_CHARACTERS) -> str:
    """Return what a model reads of a program: what it printed, and its error, in ``max_characters`` at most."""
    reasons = {
        "timeout": f"it was ended after {limits.wall_s:g} s",
        "cpu": f"it was ended after {limits.cpu_s} s of computing",
        "memory": f"it needs more than {limits.memory_mb} MiB of memory",
        "output": f"it was ended after {limits.output_kb} KiB of output",
    }
    parts = [result.stdout.rstrip()]
    if result.why:
        parts.append(f"[{reasons[result.why]}]")
    elif result.exit_code:
        parts.append(result.stderr.rstrip() or f"[it ended with status {result.exit_code}]")
    text = "\n".join(part for part in parts if part) or "[it printed nothing]"
    if len(text) <= max_characters:
        return text
    end = max_characters // 2
    return f"{text[: max_characters - end]}\n[{len(text) - max_characters} characters are left out]\n{text[-end:]}"


def sandbox_problem() -> str:
    """Return why this machine, or process, has no sandbox, and what to do, in one line; "" where it has."""
    try:
        require_sandbox()
    except SandboxUnavailable as error:
        return one_line(str(error))
    return ""


@functools.cache
def require_sandbox() -> None:
    """Raise ``SandboxUnavailable`` unless the limits are enforced: tried out, as a kernel may take one and ignore it.

    A process that has found that they are does not try again.
    """
    result = execute(plan_for(TRIAL, TRIAL_LIMITS), b"", TRIAL_LIMITS)
    *broken, last = result.stdout.splitlines() or [""]
    if last != "tried":
        raise SandboxUnavailable(f"the trial ended with {result.exit_code}: {one_line(result.stderr)}")
    if broken:
        named = ", ".join(broken)
        raise SandboxUnavailable(f"the kernel does not enforce {named}; use another machine, or another user")
