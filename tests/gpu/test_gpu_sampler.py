"""The draw of a decode step on a GPU. Run with: bash tests/run.sh tests/gpu/test_gpu_sampler.py"""

from __future__ import annotations

import pytest
import torch

from megatron_rl.arithmetic import uniform
from megatron_rl.inference.sampler import SamplingTensors, draw
from tests.unit.inference.test_sampling_kernel import DrawChecks

pytestmark = pytest.mark.gpu
VOCABULARY = 151665


class TestCompiled(DrawChecks):
    """The checks of the interpreter, compiled, and the vocabulary of a model."""

    device = "cuda"

    @pytest.mark.parametrize("rows", [1, 32, 256])
    def test_the_vocabulary_of_a_model(self, rows):
        generator = torch.Generator().manual_seed(rows)
        logits = torch.randn(rows, VOCABULARY, generator=generator) * 3
        self.check(logits, torch.rand(rows, generator=generator) * 0.999 + 1e-4)

    @pytest.mark.parametrize("filters", [{}, {"top_k": 20}, {"top_p": 0.9}])
    def test_a_gpu_draws_as_a_cpu(self, filters):
        rows, columns = 64, 5000
        logits = torch.randn(rows, columns, generator=torch.Generator().manual_seed(5)) * 3
        drawn = []
        for device in ("cpu", "cuda"):
            params = SamplingTensors(
                seeds=torch.arange(rows, device=device),
                temperature=torch.full((rows,), 0.8, device=device),
                top_k=torch.full((rows,), filters.get("top_k", columns), device=device) if filters else None,
                top_p=torch.full((rows,), filters.get("top_p", 1.0), device=device) if filters else None,
            )
            numbers = uniform(params.seeds, params.seeds)
            drawn.append([result.cpu() for result in draw(logits.to(device), numbers, params)])
        (on_cpu, cpu_logprobs), (on_gpu, gpu_logprobs) = drawn
        same = on_cpu == on_gpu
        assert same.sum() >= rows - 1, "a number may fall on a border"
        torch.testing.assert_close(cpu_logprobs[same], gpu_logprobs[same], rtol=1e-5, atol=1e-5)
