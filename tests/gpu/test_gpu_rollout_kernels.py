"""The kernels between a layer's products, compiled. Run with: bash tests/run.sh tests/gpu"""

from __future__ import annotations

import pytest

from tests.unit.models.test_rollout_kernels import KernelChecks
from tests.unit.models.test_training_kernels import TrainingChecks

pytestmark = pytest.mark.gpu


class TestCompiled(KernelChecks):
    """The checks of the interpreter."""

    device, paged = "cuda", "triton_paged"
    low = {"rtol": 2**-7, "atol": 2**-6}


class TestTrainingCompiled(TrainingChecks):
    """The checks of the interpreter, with gradients."""

    device, low = "cuda", 2**-7
