"""Rollouts with experts over ranks; run on every rank by `test_expert_rollouts.py`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.inference.engine import EngineOptions
from megatron_rl.inference.lockstep import LockstepEngine
from megatron_rl.models import rollout_mode
from megatron_rl.parallel import initialize, shut_down
from megatron_rl.parallel.collectives import any_rank
from megatron_rl.platform import current_platform
from tests.support.generation import END, letters, ragged_requests, rollout_engine
from tests.support.tiny import SHAPES, single_thread, tiny_config, tiny_policy

GROUPS = 5


def complete(parallel: Mapping[str, Any], deals: Mapping[str, list[int]]) -> dict[str, Any]:
    """Tokens, log-probs and experts of this rank's groups by number, for each way of dealing them to the replicas.

    A deal says which replica gets each group.
    """
    single_thread()
    config = tiny_config(int(os.environ["WORLD_SIZE"]), **SHAPES["experts"], rl_router_replay=True)
    sizes = {"expert_tensor_parallel_size": None} | parallel
    config = replace(config, parallel=replace(config.parallel, **sizes))
    groups = initialize(config.parallel, current_platform())
    policy, sizes = tiny_policy(config), EngineOptions(8, 48, records_routing=True)
    found = {}
    for name, deal in deals.items():
        # One that looks for prefixes prefills in two passes.
        engine = rollout_engine(policy, records_routing=True)
        if groups.shares_experts:
            engine = LockstepEngine(policy, sizes, [END], letters, groups)
        wanted = ragged_requests(GROUPS, num_samples=3, longest_prompt=30, max_new_tokens=16)
        wanted += [replace(one, index=one.index + GROUPS, prompt_ids=one.prompt_ids + (1, 2)) for one in wanted]
        mine = [one for one in wanted if deal[one.index % GROUPS] == groups.rollout_group.rank()]
        answers = {}
        with rollout_mode(policy):
            engine.begin(1, 0)
            for one in mine:
                engine.submit(replace(one, wants_routing=True))
            while any_rank(engine.has_unfinished, groups.lockstep_group):
                for request, completions in engine.step():
                    answers[request.index] = [
                        [list(c.token_ids), list(c.inference_logprobs), c.routing.sort(-1).values.tolist()]
                        for c in completions
                    ]
        found[name] = {"answers": answers, "decode steps": engine.statistics.decode_steps}
    shut_down()
    return found
