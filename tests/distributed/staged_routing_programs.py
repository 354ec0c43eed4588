"""The journal of a model copy on tensor-parallel ranks and pipeline stages; run by `test_staged_routing.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from megatron_rl.inference.staged import StagedRouting
from megatron_rl.platform import current_platform
from megatron_rl.platform.groups import initialize, shut_down
from megatron_rl.rollout.journal import RolloutJournal
from tests.support.rollouts import graded_group, request_of, with_routing
from tests.support.tiny import tiny_config

STAGES = ((0, 2), (1, 3))
"""The layers of each of two stages, which are interleaved."""
HEADER = {"seed": 7}


def write_and_read(folder: str) -> list[bool]:
    """A group goes into the journal and comes back with the layers of this stage; one without experts has none."""
    parallel = replace(tiny_config().parallel, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    groups = initialize(parallel, current_platform())
    own = STAGES[groups.stage]
    known = graded_group([0.0, 1.0], lengths=[3, 5])
    mine = with_routing(known, own)
    results = []
    for number, group in enumerate((mine, known)):
        step = RolloutJournal(Path(folder), groups, StagedRouting(own, 4, groups)).open(1, HEADER)
        step.add(number, group)
        step.close()
    step = RolloutJournal(Path(folder), groups, StagedRouting(own, 4, groups)).open(1, HEADER)
    for rollout, wanted in zip(step.group_for(request_of(mine, 0)).rollouts, mine.rollouts, strict=True):
        results.append(torch.equal(rollout.completion.routing, wanted.completion.routing))
    results += [rollout.completion.routing is None for rollout in step.group_for(request_of(known, 1)).rollouts]
    step.close()
    shut_down()
    return results
