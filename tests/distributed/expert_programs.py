"""Rollouts with experts over ranks; run on every rank by `test_expert_rollouts.py`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import QuantizationError
from megatron_rl.inference.engine import Engine, EngineOptions
from megatron_rl.inference.staged import StagedEngine
from megatron_rl.models.gpt import rollout_mode
from megatron_rl.platform import current_platform
from megatron_rl.platform.collectives import any_rank
from megatron_rl.platform.groups import ParallelGroups, initialize, shut_down
from megatron_rl.quantization.audit import LayerAudit
from megatron_rl.quantization.rollout import RolloutQuantization
from megatron_rl.types import Hints, Place
from tests.support.generation import END, letters, ragged_requests, rollout_engine
from tests.support.tape import taped
from tests.support.tiny import SHAPES, single_thread, tiny_config, tiny_policy

GROUPS = 5


def complete(
    parallel: Mapping[str, Any],
    deals: Mapping[str, list[int]],
    recipe: str = "none",
    skip: tuple[str, ...] = (),
    taped_steps: bool = False,
    samples: int = 2,
    **settings: Any,
) -> dict[str, Any]:
    """Tokens, log-probs and experts of this rank's groups by number, for each way of dealing them to the replicas.

    A deal says which replica gets each group.
    """
    config, groups = begin(parallel, **settings)
    policy, sizes = tiny_policy(config), EngineOptions(8, 48, records_routing=True)
    found = {}
    for name, deal in deals.items():
        audit: list[LayerAudit] = []
        model = torch.nn.ModuleList(policy.chunks)
        quantization = RolloutQuantization(model, recipe, skip, audit.extend, lockstep_group=groups.lockstep_group)
        # One that looks for prefixes prefills in two passes.
        engine: Engine = rollout_engine(policy, records_routing=True)
        if config.stages.count > 1:
            engine = StagedEngine(policy, sizes, [END], letters, groups)
        lanes = engine.lanes if isinstance(engine, StagedEngine) else [engine]
        recorders = [taped(lane, policy, key_lengths=(48,)) for lane in lanes if taped_steps]
        wanted = ragged_requests(GROUPS, num_samples=samples, longest_prompt=30, max_new_tokens=12)
        wanted += [replace(one, index=one.index + GROUPS, prompt_ids=one.prompt_ids + (1, 2)) for one in wanted]
        mine = [one for one in wanted if deal[one.index % GROUPS] == groups.rollout_group.rank()]
        answers, answered_calls = {}, 0
        with rollout_mode(policy), quantization.rollout():
            engine.begin(1, 0)
            for one in mine:
                engine.submit(replace(one, hints=Hints(wants_routing=True)))
            if mine and groups.shares_experts:  # a call besides, which is cancelled where it has no answer yet
                engine.submit(replace(mine[-1], index=-1, num_samples=1, place=Place(turn=1, call=7)))
            while any_rank(engine.has_unfinished, groups.lockstep_group):
                for request, completions in engine.step():
                    if request.place.call is not None:
                        answered_calls += 1
                        continue
                    answers[request.index] = [
                        [list(c.token_ids), list(c.inference_logprobs), c.routing.sort(-1).values.tolist()]
                        for c in completions
                    ]
                engine.cancel([7])
        rows = [[row.layer, row.ran, row.calls] for row in audit]
        found[name] = {"answers": answers, "answered calls": answered_calls, "audit": rows}
        found[name]["decode steps"] = engine.statistics.decode_steps
        found[name]["tapes"] = [sum(r.recorded for r in recorders), sum(r.replayed for r in recorders)]
        found[name]["layers"] = [layer.index for layer in policy.layout.layers]
    shut_down()
    return found


def begin(parallel: Mapping[str, Any], **settings: Any) -> tuple[RLConfig, ParallelGroups]:
    """A tiny model with experts, over ranks."""
    single_thread()
    shape = SHAPES[settings.pop("shape", "experts")]
    config = tiny_config(int(os.environ["WORLD_SIZE"]), **shape | settings, rl_router_replay=True)
    sizes = {"expert_tensor_parallel_size": None} | parallel
    config = replace(config, parallel=replace(config.parallel, **sizes))
    return config, initialize(config.parallel, current_platform())


def refuse(parallel: Mapping[str, Any], **settings: Any) -> str:
    """What this rank says of a weight of the last expert that is not finite."""
    config, groups = begin(parallel, **settings)
    policy, said = tiny_policy(config), ""
    quantization = RolloutQuantization(policy.gpt, "int8", (), lambda _: None, lockstep_group=groups.lockstep_group)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "experts.3.linear_fc2" in name:
                parameter[0, 0] = float("nan")
    try:
        with quantization.rollout():
            pass
    except QuantizationError as error:
        said = str(error)
    shut_down()
    return said
