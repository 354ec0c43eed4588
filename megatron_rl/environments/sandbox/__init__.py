"""Code that nobody has looked at, run where it can do no harm (docs/sandbox.md).

    run_python       one program in a sandbox of its own
    sandbox_problem  why this machine has none, in one line; "" where it has
    python_tool      the same as a tool that a model calls
"""

from __future__ import annotations

from megatron_rl.environments.sandbox.execution import Execution
from megatron_rl.environments.sandbox.plan import Limits, SandboxUnavailable
from megatron_rl.environments.sandbox.python import python_tool, require_sandbox, run_python, sandbox_problem

__all__ = ["Execution", "Limits", "SandboxUnavailable"]
__all__ += ["python_tool", "require_sandbox", "run_python", "sandbox_problem"]
