"""`megatron-rl serve`: a generator's engine answers the calls of an endpoint.

    main rank   wait for calls ── take ──┐                          ┌── deliver, progress
    all ranks                            └─► broadcast ─► submit ─► step ─► ...
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from megatron_rl.endpoint.calls import Call, Endpoint
from megatron_rl.endpoint.sessionless import request, told
from megatron_rl.generation import Generator
from megatron_rl.inference.engine import Engine
from megatron_rl.parallel.collectives import broadcast_json

_LOOK_FOR_STOP_S = 0.5


def serve(generator: Generator, endpoint: Endpoint | None, stop: Callable[[], bool]) -> None:
    """Answer calls until ``stop`` says yes on the main rank. Collective over the job, one copy of the model.

    ``endpoint``, on the main rank alone, was started.
    """
    engine, alone = generator.engine, generator.groups.model_group.size() == 1
    streams: set[int] = set()
    while True:
        calls = None if endpoint is None else _news(endpoint, engine, stop)
        # Without a seed of the caller no two calls have the same.
        rows = None if calls is None else [told(call, secrets.token_hex(8)) for call in calls]
        rows = rows if alone else broadcast_json(rows, source=0)
        if rows is None:
            return
        for row in rows:
            engine.submit(request(**row))
        if endpoint is not None:
            streams.update(call.number for call in calls if call.wants_progress)
            _step(engine, endpoint, streams)
        elif engine.has_unfinished:
            engine.step()


def _news(endpoint: Endpoint, engine: Engine, stop: Callable[[], bool]) -> list[Call] | None:
    """The calls that have come, waited for where there is nothing else to do; None: it is time to stop."""
    while not stop():
        calls = endpoint.take()
        if calls or engine.has_unfinished:
            return calls
        endpoint.wait_blocking(_LOOK_FOR_STOP_S)
    return None


def _step(engine: Engine, endpoint: Endpoint, streams: set[int]) -> None:
    """Reads the device for those that stream alone."""
    if not engine.has_unfinished:
        return
    for answered, (completion,) in engine.step():
        streams.discard(answered.call)
        endpoint.deliver(answered.call, completion)
    for asked, token_ids in engine.unfinished_tokens(lambda asked: asked.call in streams):
        endpoint.progress(asked.call, token_ids)
