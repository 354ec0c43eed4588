"""The offload's cost is measured on the state it is about."""

from __future__ import annotations

import pytest

from megatron_rl.parallel import ParallelGroups
from megatron_rl.platform import current_platform
from tests.support.samples import tiny_optimization
from tools.benchmark.offload import _with_moments, measure


def test_the_figures_are_of_main_parameters_and_both_moments(one_rank: ParallelGroups) -> None:
    optimization = _with_moments(tiny_optimization(bf16=True, use_distributed_optimizer=True))
    numbers = sum(parameter.numel() for parameter in optimization.policy.gpt.parameters())
    figures = measure(optimization, current_platform(), rounds=2)
    assert figures["state MiB"] == pytest.approx(12 * numbers / 2**20)
    assert figures["gradients MiB"] >= 4 * numbers / 2**20
    assert figures["leave GiB/s"] == pytest.approx(figures["state MiB"] / 1024 / figures["leave s"])
