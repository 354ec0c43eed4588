"""A GPU that cannot keep the addresses of --rl-persist-cuda-graphs, before there is a model."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_rl import platform
from megatron_rl.platform import Platform, reserved
from megatron_rl.run.preflight import preflight
from megatron_rl.run.preflight.machine import graph_problems
from tests.support.reserved import DEVICE, HostDriver, HostLibrary
from tests.support.tiny import tiny_config

KEPT = {"rl_persist_cuda_graphs": True}


@pytest.fixture(params=[True, False], ids=["new", "old"])
def can(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """On a GPU that can, and on one that cannot."""
    monkeypatch.setattr(platform, "current_platform", lambda: Platform(DEVICE, "nccl"))
    monkeypatch.setattr(reserved, "CudaDriver", lambda device: HostDriver(HostLibrary(request.param)))
    return request.param


def test_the_driver_is_asked(can: bool) -> None:
    line = (
        "--rl-persist-cuda-graphs cannot be had: this GPU has no virtual memory management; leave it out (graphs are "
        "captured in every step)"
    )
    assert [problem.text for problem in graph_problems(tiny_config(**KEPT))] == ([] if can else [line])
    assert (line in map(str, preflight(tiny_config(**KEPT), is_run=False))) is not can


@pytest.mark.parametrize(
    "flags",
    [{}, {"enable_cuda_graph": True}, KEPT | {"no_enable_cuda_graph": True},
     KEPT | {"check": True, "check_world_size": 1}],
)
def test_nobody_is_asked_where_nothing_is_kept_here(flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "current_platform", None)
    assert graph_problems(tiny_config(**flags)) == []


def test_a_cpu_has_no_graphs_to_keep() -> None:
    assert graph_problems(tiny_config(**KEPT)) == []
