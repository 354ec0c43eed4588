"""`megatron-rl serve`: a generator's engine answers the calls of an endpoint.

    main rank   wait for calls ── take ──┐                                  ┌── deliver, show
    all ranks                            └─► broadcast ─► submit, cancel ─► step ─► ...
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from megatron_rl.endpoint.calls import Call, Endpoint, outside_sessions, request_of
from megatron_rl.generation import Generator
from megatron_rl.inference.engine import Engine
from megatron_rl.platform.collectives import broadcast_json

_LOOK_FOR_STOP_S = 0.5


def serve(generator: Generator, endpoint: Endpoint | None, stop: Callable[[], bool]) -> None:
    """Answer calls until ``stop`` says yes on the main rank. Collective over the job, one copy of the model.

    ``endpoint``, on the main rank alone, was started.
    """
    engine, alone = generator.engine, generator.groups.model_group.size() == 1
    while True:
        calls = None if endpoint is None else _news(endpoint, engine, stop)
        # Without a seed of the caller no two calls have the same.
        rows = [outside_sessions(call, secrets.token_hex(8)) for call in calls or ()]
        news = None if calls is None else (rows, endpoint.take_cancelled())
        news = news if alone else broadcast_json(news, source=0)
        if news is None:
            return
        rows, cancelled = news
        for row in rows:
            engine.submit(request_of(**row))
        engine.cancel(cancelled)
        answers = engine.step() if engine.has_unfinished else []
        if endpoint is not None:
            for answered, (completion,) in answers:
                endpoint.deliver(answered.place.call, completion)
            endpoint.show(engine)


def _news(endpoint: Endpoint, engine: Engine, stop: Callable[[], bool]) -> list[Call] | None:
    """The calls that have come, waited for where there is nothing else to do; None: it is time to stop."""
    while not stop():
        calls = endpoint.take()
        if calls or engine.has_unfinished:
            return calls
        endpoint.wait_blocking(_LOOK_FOR_STOP_S)
    return None
