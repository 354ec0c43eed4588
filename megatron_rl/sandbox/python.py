"""One program in a sandbox of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_rl.sandbox.execution import execute
from megatron_rl.sandbox.limits import Execution, Limits
from megatron_rl.sandbox.plan import plan_for
from megatron_rl.sandbox.probe import require_sandbox


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
