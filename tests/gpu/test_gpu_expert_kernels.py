"""The kernels around experts, compiled, and the same tokens twice. Run with: bash tests/run.sh tests/gpu"""

from __future__ import annotations

import pytest
import torch

from megatron_rl.models.expert_ops import ExpertOps
from tests.unit.models.test_expert_kernels import ExpertChecks, dispatched

pytestmark = pytest.mark.gpu


class TestCompiled(ExpertChecks):
    """The checks of the interpreter."""

    device, paged = "cuda", "triton_paged"
    low = {"rtol": 2**-7, "atol": 2**-7}

    def test_the_same_sums_each_time(self):
        """To the bit in bf16: nothing is added atomically."""
        ops = ExpertOps(fused=True)
        chosen = torch.rand(256, 128).topk(8, 1).indices
        made, rows = dispatched(ops, chosen, 128, torch.randn(256, 2048, device="cuda").bfloat16())
        output = torch.randn(rows, 2048, device="cuda").bfloat16()
        first = ops.combine(output, made, 256)
        assert all(torch.equal(ops.combine(output, made, 256), first) for _ in range(20))
        wanted = torch.zeros(256, 2048, device="cuda")
        for rows_of_one in made.combine_index.unbind(1):
            wanted += output[rows_of_one].float()
        assert torch.equal(first, wanted.bfloat16())
