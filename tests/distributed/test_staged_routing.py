"""The journal of pipeline stages has the experts of all layers, so another layout may read it."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.journal import RolloutJournal
from tests.distributed.staged_routing_programs import HEADER
from tests.support.ranks import run_ranks
from tests.support.rollouts import graded_group, request_of, with_routing


def test_one_rank_goes_on_from_the_journal_of_stages(one_rank: ParallelGroups, tmp_path: Path) -> None:
    reports = run_ranks("tests.distributed.staged_routing_programs:write_and_read", 4, folder=str(tmp_path))
    assert reports == [[True] * 4] * 4
    whole = with_routing(graded_group([0.0, 1.0], lengths=[3, 5]), range(4))
    found = RolloutJournal(tmp_path, one_rank).open(1, HEADER).group_for(request_of(whole, 0))
    for rollout, wanted in zip(found.rollouts, whole.rollouts, strict=True):
        assert torch.equal(rollout.completion.routing, wanted.completion.routing)
