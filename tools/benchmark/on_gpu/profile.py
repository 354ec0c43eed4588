"""The kernels that a piece of work spends its time in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from megatron_rl.platform import Platform

LARGEST = 20
LONGEST_NAME = 72


def largest_kernels(platform: Platform, work: Callable[[], object]) -> Iterator[dict[str, Any]]:
    """The `LARGEST` kernels of one ``work`` by their time on the GPU; on a CPU operators, by their own time."""
    activity, where = ProfilerActivity.CPU, DeviceType.CPU
    if platform.is_cuda:
        activity, where = ProfilerActivity.CUDA, DeviceType.CUDA
    platform.synchronize()
    with torch.profiler.profile(activities=[activity]) as seen:
        work()
        platform.synchronize()
    times = []
    for event in seen.key_averages():
        if event.device_type == where:  # the host's calls of CUDA are among the events
            took = event.self_device_time_total if platform.is_cuda else event.self_cpu_time_total
            times.append((took, event.count, event.key))
    whole = sum(took for took, _, _ in times)
    for took, count, name in sorted(times, reverse=True)[:LARGEST]:
        yield {"kernel": name[:LONGEST_NAME], "calls": count, "us": took, "share": took / whole if whole else None}
