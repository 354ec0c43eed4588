"""The rollout engine on pipeline stages; run on every rank by `test_stages.py`, and on one to compare with."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import QuantizationError
from megatron_rl.inference.engine import Engine, EngineOptions, GraphOptions
from megatron_rl.inference.graphs import DecodeGraphs, graph_key_lengths, graph_sizes
from megatron_rl.inference.model_runner import Part
from megatron_rl.inference.rollout_engine import RolloutEngine
from megatron_rl.inference.staged import StagedEngine
from megatron_rl.models.gpt import PolicyModel, rollout_mode
from megatron_rl.platform import current_platform
from megatron_rl.platform.collectives import StageMessages
from megatron_rl.platform.groups import ParallelGroups, initialize, shut_down
from megatron_rl.quantization.rollout import RolloutQuantization
from megatron_rl.types import Completion, Hints, Place, Request
from tests.support.generation import END, drain, drain_with_pauses, letters, ragged_requests
from tests.support.tape import EagerRecorder, taped
from tests.support.tiny import single_thread, tiny_config, tiny_policy

Report = dict[str, Any]
BEGINNING = (4, 9, 14, 19)


def roll_out(parallel: Mapping[str, Any], cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Report]:
    """Each case's completions. A case is flags, and ``options`` of the engine, ``requests``, ``parallel`` sizes."""
    single_thread()
    configs = {name: configured(parallel, case) for name, case in cases.items()}
    groups = initialize(next(iter(configs.values())).parallel, current_platform())
    reports = {name: one_case(configs[name], groups, cases[name]) for name in cases}
    shut_down()
    return reports


def send_many(parallel: Mapping[str, Any], count: int, in_flight: int) -> list[float]:
    """The first stage: how many messages' memory it holds after each of ``count``. The last: what it received."""
    groups = initialize(configured(parallel, {}).parallel, current_platform())
    messages = StageMessages(groups, torch.device("cpu"), in_flight)
    seen: list[float] = []
    sent: list[weakref.ref[torch.Tensor]] = []
    for number in range(count):
        if groups.stage == 0:
            tensor = torch.full((1000,), float(number))
            sent.append(weakref.ref(tensor))
            messages.send(tensor)
            del tensor
            seen.append(sum(one() is not None for one in sent))
        else:
            seen.append(messages.receive(1000, dtype=torch.float32).mean().item())
    shut_down()
    return seen


def configured(parallel: Mapping[str, Any], case: Mapping[str, Any]) -> RLConfig:
    flags = {"num_layers": 4, "seq_length": 96} | dict(case.get("flags", {}))
    config = tiny_config(int(os.environ["WORLD_SIZE"]), **flags)
    sizes = {**parallel, **(case.get("parallel", {}) if parallel else {})}
    return replace(config, parallel=replace(config.parallel, **sizes))


def one_case(config: RLConfig, groups: ParallelGroups, case: Mapping[str, Any]) -> Report:
    policy = tiny_policy(config)
    uneven_vectors(policy)
    replay = config.rollout.rl_router_replay
    sizes = {"max_batch_size": 16, "max_sequence_length": 64, "records_routing": replay}
    graphs = GraphOptions(case["captures"]) if "captures" in case else None
    options = EngineOptions(**sizes | dict(case.get("options", {})), graphs=graphs)
    engine = build(policy, options, groups)
    lanes = engine.lanes if isinstance(engine, StagedEngine) else []
    # Every key length: a mask of more keys than there are may add up in another order.
    lengths = range(1, options.max_sequence_length + 1)
    recorders = [taped(lane, policy, key_lengths=lengths) for lane in lanes if case.get("tapes")]
    for lane in lanes if case.get("refused") == groups.stage else ():
        graphs = lane.runner.graphs
        graphs.parts = [partial(reading, part) for part in graphs.parts]
    for lane in lanes if case.get("twin") else ():  # of an engine with graphs
        sizes = graph_sizes(lane.max_batch_size, 16), graph_key_lengths(options.max_sequence_length)
        lane.runner.graphs = DecodeGraphs(lane.runner, policy, EagerRecorder(), *sizes)
    wanted = {"count": 6, "num_samples": 3, "max_new_tokens": 10} | dict(case.get("requests", {}))
    # At least `FEWEST_ROWS` tokens: a shorter prompt computed alone adds up in another order, on one rank as well.
    hints = Hints(wants_routing=replay, goes_on=case.get("turns", False))
    requests = [
        replace(one, prompt_ids=(*BEGINNING, *one.prompt_ids), hints=hints) for one in ragged_requests(**wanted)
    ]
    recipe = case.get("recipe")
    audits: list[Any] = []
    quantization = None
    if recipe:
        model = torch.nn.ModuleList(policy.chunks)
        quantization = RolloutQuantization(
            model, recipe, case.get("skip", ()), audits.append, lockstep_group=groups.lockstep_group
        )
    report: Report = {"steps": [], "replays": []}
    again = [("again", 1)] if case.get("again") else []
    for name, seed in [(1, 1), (2, 2), *again]:  # the later ones find whatever the earlier ones have left
        replayed = sum(recorder.replayed for recorder in recorders)
        with rollout_mode(policy), nullcontext() if quantization is None else quantization.rollout():
            engine.begin(seed, 0)
            for request in requests:
                engine.submit(request)
            completions = complete(engine, requests, case, seed)
        report[f"tokens {name}"] = [c.token_ids for group in completions for c in group]
        report[f"logprobs {name}"] = [c.inference_logprobs for group in completions for c in group]
        report[f"endings {name}"] = [c.finish_reason for group in completions for c in group]
        report["steps"].append(engine.statistics.decode_steps)
        report["replays"].append(sum(recorder.replayed for recorder in recorders) - replayed)
        if replay:
            every = torch.cat([c.routing for group in completions for c in group]).sort(-1).values
            layers = [layer.index for layer in policy.layout.layers]
            report[f"experts {name}"] = {str(n): every[:, at].tolist() for at, n in enumerate(layers)}
    statistics = engine.statistics
    counts = ("preemptions", "reused_tokens", "completions")
    report["counts"] = {name: getattr(statistics, name) for name in counts}
    report["recorded"] = sum(len(lane.runner.graphs.recorded) for lane in lanes if lane.runner.graphs is not None)
    report["rows"] = engine.max_batch_size
    report["lanes"] = len(lanes) or 1
    report["audit"] = [(row.layer, row.ran) for rows in audits for row in rows]
    return report


def complete(engine: Any, requests: list[Any], case: Mapping[str, Any], seed: int) -> list[Any]:
    """The completions of each request, cancelled, interrupted or gone on with as the case has it."""
    if case.get("cancels"):
        completions = drain_cancelling(engine, requests)
    elif case.get("pauses"):
        completions = drain_with_pauses(engine, requests, seed)
    else:
        completions = drain(engine, requests)
    return completions + second_turns(engine, requests, completions) if case.get("turns") else completions


def reading(part: Part, *step: Any) -> None:
    """A part that no graph can hold: the host reads."""
    part(*step)
    torch.ones(1).nonzero()


def refuse(parallel: Mapping[str, Any]) -> list[str]:
    """What this rank says of a weight of the last stage that is not finite, and of a layer there left as it is."""
    single_thread()
    config = configured(parallel, {})
    groups = initialize(config.parallel, current_platform())
    policy, said = tiny_policy(config), []
    quantization = RolloutQuantization(
        torch.nn.ModuleList(policy.chunks), "int8", (), lambda _: None, lockstep_group=groups.lockstep_group
    )
    engine, last = build(policy, EngineOptions(16, 64), groups), quantization.linears.layers[-1]
    is_last = groups.stage == groups.pipeline_group.size() - 1

    def roll_out() -> None:
        with rollout_mode(policy), quantization.rollout():
            if is_last:
                last.remove()
            engine.begin(1, 0)
            requests = ragged_requests(2, max_new_tokens=4)
            for request in requests:
                engine.submit(request)
            drain(engine, requests)

    with torch.no_grad():
        kept = last.module.weight[0, 0].clone()
        for value in (float("nan") if is_last else kept, kept):
            last.module.weight[0, 0] = value
            try:
                roll_out()
            except QuantizationError as error:
                said.append(str(error))
    shut_down()
    return said


def build(policy: PolicyModel, options: EngineOptions, groups: ParallelGroups) -> Engine:
    if groups.pipeline_group.size() > 1:
        return StagedEngine(policy, options, (END,), letters, groups)
    return RolloutEngine(policy, options, (END,), letters, groups)


def drain_cancelling(engine: Engine, requests: list[Request]) -> list[tuple[Completion, ...]]:
    """As `drain`, beside calls that are cancelled one by one, a step of the engine after each other."""
    calls = [
        replace(one, index=100 + one.index, num_samples=1, place=Place(turn=1, call=one.index)) for one in requests
    ]
    for call in calls:
        engine.submit(call)
    found = {}
    for call in calls:
        found |= {done.index: group for done, group in engine.step()}
        engine.cancel([call.place.call])
    while engine.has_unfinished:
        found |= {done.index: group for done, group in engine.step()}
    return [found[request.index] for request in requests]


def second_turns(
    engine: Engine, requests: list[Request], completions: list[tuple[Completion, ...]]
) -> list[tuple[Completion, ...]]:
    """Every sample goes on after three tokens that it reads."""
    later = [
        replace(
            request, prompt_ids=(*request.prompt_ids, *done.token_ids, 5, 7, 9), num_samples=1,
            place=Place(sample, turn=1),
        )
        for request, group in zip(requests, completions, strict=True)
        for sample, done in enumerate(group)
    ]
    for request in later:
        engine.submit(request)
    found = {}
    while engine.has_unfinished:
        found |= {(done.index, done.place.first_sample): group for done, group in engine.step()}
    return [found[request.index, request.place.first_sample] for request in later]


def uneven_vectors(policy: PolicyModel) -> None:
    """Biases are 0 and norm weights 1 when they are drawn, which would hide a missing term."""
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if parameter.dim() == 1:
                layer = int(name.split(".")[2]) if ".layers." in f".{name}" else 9
                parameter.add_(0.05 * (layer + 1 + ("norm" in name)))
