"""A Python in a sandbox of its own: one program, and the same as a tool that a model calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_rl.environments.sandbox.execution import execute
from megatron_rl.environments.sandbox.limits import Execution, Limits
from megatron_rl.environments.sandbox.plan import plan_for
from megatron_rl.environments.sandbox.probe import require_sandbox

MAX_CHARACTERS = 4_000
"""Of an answer: what a model reads costs its context."""
LIMITS = Limits(cpu_s=3, wall_s=4.0)
"""Of a call: a step of an environment has 5 seconds, with the sandbox's own start."""


def run_python(
    code: str,
    stdin: str = "",
    limits: Limits | None = None,
    files: Mapping[str, str | bytes] | None = None,
    packages: Sequence[str] = (),
) -> Execution:
    """Runs ``code`` in a fresh Python in a sandbox of its own, and waits for it.

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
    """The tool ``python``: its schema as in OpenAI's API, and the function from code to what the model reads.

    Each call is a program of its own: no variable and no file outlives it. The function raises
    ``SandboxUnavailable`` where the machine has no sandbox; whatever the code does becomes text.
    """
    about = "Runs a Python program in a fresh interpreter and returns what it prints. Nothing is kept between calls"
    about += f"; it may import {', '.join(packages)}." if packages else "; it has the standard library."
    code = {"type": "string", "description": "The program. Only what it prints is returned."}
    parameters: Mapping[str, Any] = {"type": "object", "properties": {"code": code}, "required": ["code"]}
    schema = {"type": "function", "function": {"name": "python", "description": about, "parameters": dict(parameters)}}

    def call(code: str) -> str:
        return shown(run_python(code, limits=limits, packages=packages), limits, max_characters)

    return schema, call


def shown(result: Execution, limits: Limits, max_characters: int = MAX_CHARACTERS) -> str:
    """What a model reads of a program: what it printed, and its last error, in at most ``max_characters``."""
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
