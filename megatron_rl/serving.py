"""`megatron-rl serve`: a generator's engine answers the calls of an endpoint.

    main rank   wait for calls ── take ──┐                          ┌── deliver, progress
    all ranks                            └─► broadcast ─► submit ─► step ─► ...
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from megatron_rl.endpoint.calls import Call, Endpoint
from megatron_rl.generation import Generator
from megatron_rl.inference.engine import Engine
from megatron_rl.parallel.collectives import broadcast_json
from megatron_rl.types import Request, SamplingParams, SourcedTask, Task

SOURCE = "serve"
"""Stands for the name of an environment where draws are seeded."""
_LOOK_FOR_STOP_S = 0.5


def serve(generator: Generator, endpoint: Endpoint | None, stop: Callable[[], bool]) -> None:
    """Answer calls until ``stop`` says yes on the main rank. Collective over the job, one copy of the model.

    ``endpoint``, on the main rank alone, was started.
    """
    engine, alone = generator.engine, generator.groups.model_group.size() == 1
    streams: set[int] = set()
    while True:
        told = None if endpoint is None else _news(endpoint, engine, stop)
        told = told if alone else broadcast_json(told, source=0)
        if told is None:
            return
        for row in told:
            engine.submit(_request(**row))
        if endpoint is not None:
            streams.update(row["number"] for row in told if row["streams"])
            _step(engine, endpoint, streams)
        elif engine.has_unfinished:
            engine.step()


def _news(endpoint: Endpoint, engine: Engine, stop: Callable[[], bool]) -> list[dict[str, Any]] | None:
    """The calls that have come, waited for where there is nothing else to do; None: it is time to stop."""
    while not stop():
        calls = endpoint.take()
        if calls or engine.has_unfinished:
            return [_told(call) for call in calls]
        endpoint.wait_blocking(_LOOK_FOR_STOP_S)
    return None


def _told(call: Call) -> dict[str, Any]:
    """What all ranks need to know of it. Without a seed of the caller no two calls have the same."""
    seed = secrets.token_hex(8) if call.seed is None else f"seed {call.seed}"
    sampling = asdict(call.sampling)
    return {
        "number": call.number, "ids": call.ids, "sampling": sampling, "seed": seed, "choice": call.branch,
        "streams": call.wants_progress,
    }  # fmt: skip


def _request(
    number: int, ids: list[int], sampling: dict[str, Any], seed: str, choice: int, streams: bool
) -> Request:
    source = SourcedTask(SOURCE, Task(seed, ""), prompt_ids=tuple(ids))
    params = SamplingParams(**sampling | {"stop": tuple(sampling["stop"])})
    return Request(source, tuple(ids), 1, params, goes_on=True, call=number, branch=choice)


def _step(engine: Engine, endpoint: Endpoint, streams: set[int]) -> None:
    """Reads the device for those that stream alone."""
    if not engine.has_unfinished:
        return
    for request, (completion,) in engine.step():
        streams.discard(request.call)
        endpoint.deliver(request.call, completion)
    for request, token_ids in engine.unfinished_tokens(lambda request: request.call in streams):
        endpoint.progress(request.call, token_ids)
