"""What megatron-core finds in place of CUDA."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.platform import current_platform, prepare

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing is redirected")


def test_the_platform_is_the_cpu() -> None:
    platform = current_platform()
    assert platform.device == torch.device("cpu")
    assert not platform.is_cuda
    assert platform.memory_metrics() == {}
    platform.synchronize()


def test_cuda_literals_end_on_the_cpu() -> None:
    for made in (
        torch.zeros(2, device="cuda"),
        torch.tensor([1.0], device=torch.device("cuda", 0)),
        torch.empty_like(torch.zeros(2), device="cuda", pin_memory=True),
        torch.arange(3, device=torch.cuda.current_device()),
        torch.ones(2).cuda(non_blocking=True),
    ):
        assert made.device.type == "cpu"
    assert torch.zeros(2).type() == "torch.cuda.FloatTensor"  # what megatron's clip_grads looks for
    assert torch.zeros(2).type(torch.float64).dtype == torch.float64


def test_the_cuda_generator_is_the_cpu_generator() -> None:
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    torch.cuda.manual_seed(5)
    assert torch.equal(torch.rand(3), first)


def test_events_measure_time_and_streams_do_nothing() -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.zeros(10).record_stream(torch.cuda.current_stream())
    end.record()
    end.synchronize()
    assert 0 <= start.elapsed_time(end) < 5000


def test_preparing_twice_changes_nothing() -> None:
    before = torch.zeros
    prepare()
    assert torch.zeros is before



@pytest.mark.parametrize("make", [lambda: torch.zeros(2), lambda: torch.arange(3), lambda: torch.tensor([1.0])])
def test_the_context_of_a_device_still_holds(make) -> None:
    """transformers builds models so; what it takes for built on ``meta`` was left with whatever lay in memory."""
    with torch.device("meta"):
        assert make().device.type == "meta"
