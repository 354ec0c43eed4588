"""The books of a decode step, compiled. Run with: bash tests/run.sh tests/gpu"""

from __future__ import annotations

import pytest

from tests.unit.inference.test_state_kernels import StateChecks

pytestmark = pytest.mark.gpu


class TestCompiled(StateChecks):
    """The checks of the interpreter."""

    device = "cuda"
