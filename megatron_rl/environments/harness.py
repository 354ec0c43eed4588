"""One sample of a harness: the OpenAI client that it is handed, and what comes of it."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import replace

from megatron_rl.environments.base import HarnessEnvironment
from megatron_rl.environments.results import caught, graded
from megatron_rl.types import Grade, HarnessRun

PRELOAD = ("megatron_rl.environments.openai_clients",)
"""For the process that forks workers."""


def run_harness(environment: HarnessEnvironment, run: HarnessRun) -> Grade:
    """The verdict on one sample, whatever the author's code does; the client's key is in no part of it."""
    result = caught(environment, run.task, lambda: graded(_reward(environment, run)))
    texts = {"message": result.message, "status": result.status, "extracted": result.extracted}
    return replace(result, **{name: text and text.replace(run.api_key, "[key]") for name, text in texts.items()})


def _reward(environment: HarnessEnvironment, run: HarnessRun) -> float | Grade:
    # imported here: it needs an extra, and graders do without
    from megatron_rl.environments.openai_clients import client_of

    if inspect.iscoroutinefunction(environment.run):
        return asyncio.run(_awaited(environment, run))
    with client_of(run) as client:
        return environment.run(run.task, client)


async def _awaited(environment: HarnessEnvironment, run: HarnessRun) -> float | Grade:
    from megatron_rl.environments.openai_clients import async_client_of

    async with async_client_of(run) as client:
        return await environment.run(run.task, client)
