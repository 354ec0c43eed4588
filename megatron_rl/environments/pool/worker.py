"""The inside of a worker process: one request at a time, until the channel closes."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from megatron_rl.environments.grading.discovery import kind_module
from megatron_rl.environments.grading.sample import grade_one, step_one
from megatron_rl.environments.loader import find_environment
from megatron_rl.environments.pool import limits
from megatron_rl.environments.pool.channel import receive, send
from megatron_rl.environments.wire import (
    dumps,
    failed,
    graded,
    loads,
    result_to_json,
    task_from_json,
    transcript_from_json,
    turn_from_json,
)
from megatron_rl.types import GradeResult

OUT_OF_MEMORY = 99
"""Exit status of a worker whose memory ran out: what is left of it is not to be trusted."""


def work(channel: socket.socket) -> None:
    """Answers requests until the pool closes the channel."""
    send(channel, {"ready": True})
    while True:
        try:
            request = receive(channel)
        except ConnectionError:
            return
        limits.allow_cpu_seconds(request["deadline_s"])
        send(channel, result_to_json(_answer(request)))
        gc.collect(0)


def prepare(reference: str, options: Mapping[str, Any]) -> None:
    """Makes an environment before the workers are forked, so that none of them imports it on its deadline.

    One that cannot be made is left to its first request, whose result says why.
    """
    with contextlib.suppress(Exception, SystemExit):
        _environment(reference, dumps(options))


def _answer(request: Mapping[str, Any]) -> GradeResult:
    """The result of one request, whatever the grader does short of killing the process."""
    try:
        if "kind" in request:
            grade = kind_module(request["kind"]).judge(request["completion"], request["gold"])
            result = graded(grade.reward, grade.metrics, grade.status, grade.extracted)
        else:
            environment = _environment(request["environment"], dumps(request["options"]))
            task = task_from_json(request["task"])
            if "turn" in request:
                result = step_one(environment, task, request["state"], turn_from_json(request["turn"]))
            else:
                result = grade_one(environment, task, transcript_from_json(request["transcript"]))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException as error:  # noqa: BLE001 - also KeyboardInterrupt, raised by an author's code
        return failed("environment_exception", f"{type(error).__name__}: {error}")
    if result.message.startswith("MemoryError"):
        os._exit(OUT_OF_MEMORY)
    return result


@lru_cache(maxsize=64)
def _environment(reference: str, options: str) -> Any:
    """Made once for each worker; a grader keeps nothing between two calls."""
    return find_environment(reference).from_options(loads(options))
