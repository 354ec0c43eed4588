"""The kernels between a layer's products, compiled. Run with: bash tests/run.sh tests/gpu"""

from __future__ import annotations

import pytest

from tests.unit.models.test_rollout_kernels import KernelChecks

pytestmark = pytest.mark.gpu


class TestCompiled(KernelChecks):
    """The checks of the interpreter."""

    device, paged = "cuda", "triton_paged"
    low = {"rtol": 2**-7, "atol": 2**-6}
