"""Calls outside sessions: nobody trains on their answers, and their callers say how they are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron_rl.endpoint.calls import Call
from megatron_rl.types import Request, SamplingParams, SourcedTask, Task

SOURCE = "endpoint"
"""Stands for the name of an environment where draws are seeded."""


def told(call: Call, seed: str) -> dict[str, Any]:
    """JSON values for `request`, so that all ranks make the same of a call; ``seed`` where its caller gives none."""
    return {
        "number": call.number, "ids": call.ids, "sampling": asdict(call.sampling), "choice": call.branch,
        "seed": seed if call.seed is None else f"seed {call.seed}",
    }  # fmt: skip


def request(number: int, ids: Sequence[int], sampling: dict[str, Any], seed: str, choice: int) -> Request:
    """What the engine is asked for."""
    source = SourcedTask(SOURCE, Task(seed, ""), prompt_ids=tuple(ids))
    params = SamplingParams(**sampling | {"stop": tuple(sampling["stop"])})
    return Request(source, tuple(ids), 1, params, goes_on=True, call=number, branch=choice)
