"""Triton's interpreter, for tests on a CPU."""

from __future__ import annotations

import os

from tests.support.forks import run_python

SWITCH = {"TRITON_INTERPRET": "1"}
"""It must be there before Triton's import, so tests are run in another process."""
INTERPRETED = SWITCH.items() <= os.environ.items()


def run_interpreted(file: str) -> None:
    """The tests of ``file`` in a process of their own, with the interpreter on."""
    run = run_python("-m", "pytest", file, env=os.environ | SWITCH, imported_under=SWITCH)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]


def mend() -> None:
    """Two faults of Triton's interpreter, the first of 3.6 alone.

    The bounds of a loop become integers in a way that numpy 2.4 refuses; a product of bf16 numbers, which numpy does
    not know, is taken of their bits.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch_tensor, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def mended_tensor(tensor, scope) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def mended_dot(self, a, b, *rest):
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, *rest)

    interpreter._patch_lang_tensor = mended_tensor
    interpreter.InterpreterBuilder.create_dot = mended_dot
