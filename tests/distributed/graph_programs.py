"""CUDA graphs that nobody asked for, with a tape in their place; run on every rank by `test_graph_probe.py`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.inference import graphs
from megatron_rl.inference.engine import EngineOptions, GraphOptions
from megatron_rl.inference.graphs import Work
from megatron_rl.models.gpt import PolicyModel, rollout_mode
from megatron_rl.platform import current_platform
from megatron_rl.platform.collectives import any_rank
from megatron_rl.platform.groups import ParallelGroups, initialize, shut_down
from tests.distributed.stage_programs import build
from tests.support.generation import ragged_requests
from tests.support.tape import TapeRecorder
from tests.support.tiny import single_thread, tiny_config, tiny_policy

OPTIONS = EngineOptions(16, 48, graphs=GraphOptions(16, after=10), decode_steps_per_sync=4)


class Recorder(TapeRecorder):
    """On a rank of ``faults`` its capture fails, or what it replays is wrong."""

    faults: Mapping[int, str] = {}
    made: list[Recorder] = []

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.made.append(self)

    def record(self, work: Work) -> Work:
        replay, fault = super().record(work), self.faults.get(dist.get_rank())
        if fault == "capture":
            raise RuntimeError("operation not permitted\nwhen stream is capturing")

        def wrong() -> None:
            replay()
            work.args[0].add_(1)

        return wrong if fault == "replay" else replay


def begin(parallel: Mapping[str, int], **settings: Any) -> tuple[PolicyModel, ParallelGroups]:
    """A tiny model over ranks that have graphs."""
    single_thread()
    config = tiny_config(int(os.environ["WORLD_SIZE"]), **settings)
    config = replace(config, parallel=replace(config.parallel, **parallel))
    groups = initialize(config.parallel, current_platform())
    graphs.CudaRecorder = Recorder
    return tiny_policy(config), groups


def generate(parallel: Mapping[str, int], **settings: Any) -> dict[str, Any]:
    """What this rank draws with and without graphs, and in which step of the engine it captured."""
    policy, groups = begin(parallel, **settings)
    found: dict[str, Any] = {}
    for name, options in (("graphs", OPTIONS), ("eager", replace(OPTIONS, graphs=None))):
        engine, turn, drawn = build(policy, options, groups), 0, dict[int, Any]()
        lanes = getattr(engine, "lanes", [engine])
        probes = len(Recorder.made) - sum(lane.runner.graphs is not None for lane in lanes)
        with rollout_mode(policy):
            engine.begin(1, 0)
            for one in ragged_requests(4, max_new_tokens=20)[groups.rollout_rank :: groups.rollout_size]:
                engine.submit(one)
            while any_rank(engine.has_unfinished, groups.lockstep_group):
                drawn |= {done.index: [list(each.token_ids) for each in group] for done, group in engine.step()}
                turn += 1
                if any(recorder.replayed for recorder in Recorder.made[probes:]):
                    found.setdefault("captured at", turn)
        found |= {name: drawn, "probes": found.get("probes", probes)}
    shut_down()
    return found


def probe(parallel: Mapping[str, int], faults: list[Mapping[str, str]]) -> list[Any]:
    """For each of ``faults``, a rank and its fault: whether this rank has graphs, and what it logs."""
    policy, groups = begin(parallel)
    said, found = list[str](), []
    graphs.logger.warning = lambda text, *given: said.append(text % given)
    for one in faults:
        Recorder.faults = {int(rank): fault for rank, fault in one.items()}
        found.append([build(policy, OPTIONS, groups).runner.graphs is not None, [*said]])
        said.clear()
    shut_down()
    return found
