"""Two launchers of one job on one host: each has its environment server, and all ranks share the host's memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_rl.metrics.rundir import RunDirectory
from megatron_rl.platform.collectives import gather_json
from megatron_rl.platform.groups import shut_down
from megatron_rl.quantization.rollout import RolloutQuantization
from megatron_rl.run.environments import first_rank_beside, open_environments
from megatron_rl.run.memory import phases
from tests.distributed.programs import join
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config, tiny_policy


def test_two_launchers_on_one_host_have_a_server_each_and_share_its_memory(tmp_path: Path) -> None:
    (tmp_path / "environments.yaml").write_text("- environment: arithmetic\n  args: {train_tasks: 4}\n")
    ranks = run_ranks("tests.distributed.test_launchers:open_everything", 2, folder=str(tmp_path))
    assert len({rank["server"] for rank in ranks}) == 2
    assert [(rank["is own"], rank["files"]) for rank in ranks] == [(True, 2), (True, 2)]
    assert [rank["tasks"] for rank in ranks] == [4, 4], "one launcher's server ends, and the other goes on"
    assert [rank["sharers"] for rank in ranks] == [2, 2]


def open_everything(folder: str) -> dict[str, Any]:
    """As the first rank of a torchrun of its own; the first one's server ends before the second asks for tasks."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    groups = join()
    config = tiny_config(2, langrl_env_config=str(Path(folder) / "environments.yaml"))
    found, meet = dict[str, Any](), partial(gather_json, "both are here", groups.rollout_group)
    with open_environments(config, groups, RunDirectory(Path(folder))) as environments:
        found["server"], _ = environments.client.server_counters()
        found["is own"] = psutil.Process(found["server"]).ppid() == os.getpid()
        found["files"] = len([*Path(folder).glob("logs/environments_*/environment_server.json")])
        meet()
        if not groups.is_main:
            meet()
        found["tasks"] = len(environments.client.fetch_tasks("arithmetic", "train"))
    if groups.is_main:
        meet()
    phases.DeviceMemory = lambda device, sharers: found.update(sharers=sharers)
    policy = tiny_policy()
    phases.Phases(config, policy, groups, RolloutQuantization(policy.gpt, "none", (), lambda rows: None))
    shut_down()
    return found


@pytest.mark.parametrize(
    ("ranks", "first"),
    [
        pytest.param([("a", 0), ("a", 1), ("b", 0), ("b", 1)], [0, 0, 2, 2], id="two hosts"),
        pytest.param([("a", 0), ("a", 1), ("a", 0), ("a", 1)], [0, 0, 2, 2], id="two launchers on a host"),
        pytest.param([("a", 0), ("b", 0), ("a", 1), ("b", 1)], [0, 1, 0, 1], id="ranks dealt out to hosts in turn"),
        pytest.param([("a", 0), ("a", 0)], [0, 1], id="no local ranks"),
        pytest.param([("a", 0), ("b", 1), ("b", 2)], [0, 1, 1], id="local ranks that count on over hosts"),
    ],
)
def test_the_first_rank_of_a_launcher(ranks: Sequence[tuple[str, int]], first: Sequence[int]) -> None:
    assert [first_rank_beside(ranks, rank) for rank in range(len(ranks))] == first
