"""The log-prob pass on a GPU. Run with: bash tests/run.sh tests/gpu/test_gpu_logprobs.py"""

from __future__ import annotations

import pytest
import torch

from megatron_rl.algorithms.logprobs import selected_logprobs
from tests.unit.algorithms.test_logprob_kernels import LogprobChecks

pytestmark = pytest.mark.gpu


class TestCompiled(LogprobChecks):
    """The checks of the interpreter, compiled."""

    device = "cuda"


def test_a_bin_of_a_published_vocabulary() -> None:
    """8,192 tokens of 151,936 columns: no memory but the logits, and half the rate of a copy at least."""
    tokens, columns, real = 8192, 151_936, 151_665
    logits = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16).requires_grad_()
    given = torch.randint(real, (tokens,), device="cuda"), torch.arange(tokens, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for timed in (False, True):
        copied = torch.cuda.Event(enable_timing=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start.record()
        values, _ = selected_logprobs(logits, *given, vocab_size=real, entropy="detached", overwrite=True)
        torch.autograd.grad(values.sum(), logits)
        end.record()
        assert torch.cuda.max_memory_allocated() - before < 2**24
        torch.empty_like(logits).copy_(logits.detach())  # reads and writes 4 bytes a logit where the pass has 6
        copied.record()
        torch.cuda.synchronize()
        assert not timed or start.elapsed_time(end) < 3 * end.elapsed_time(copied)
