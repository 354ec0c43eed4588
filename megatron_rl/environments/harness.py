"""One sample of a harness: the OpenAI client that it is handed, and what comes of it.

``openai`` is imported where it is needed: graders do without, and it takes half a second.
"""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import replace
from typing import Any

from megatron_rl.environments.base import HarnessEnvironment
from megatron_rl.environments.results import caught, failed, graded
from megatron_rl.types import Grade, HarnessRun

PRELOAD = ("openai", "openai.resources.chat.completions", "openai.resources.completions", "anyio._backends._asyncio")
"""What a worker of a harness would import at its first call, 0.6 s in all."""


def run_harness(environment: HarnessEnvironment, run: HarnessRun) -> Grade:
    """The verdict on one sample, whatever the author's code does; the client's key is in no part of it."""
    if not isinstance(environment, HarnessEnvironment):
        return failed("environment_exception", f"{environment.name} is no harness: it has no run")
    result = caught(environment, run.task, lambda: graded(_reward(environment, run)))
    texts = {"message": result.message, "status": result.status, "extracted": result.extracted}
    return replace(result, **{name: text and text.replace(run.api_key, "[key]") for name, text in texts.items()})


def _reward(environment: HarnessEnvironment, run: HarnessRun) -> float | Grade:
    if inspect.iscoroutinefunction(environment.run):
        return asyncio.run(_awaited(environment, run))
    import openai

    with openai.OpenAI(**_settings(run), http_client=openai.DefaultHttpxClient(trust_env=False)) as client:
        return environment.run(run.task, client)


async def _awaited(environment: HarnessEnvironment, run: HarnessRun) -> float | Grade:
    import openai

    async with openai.AsyncOpenAI(
        **_settings(run), http_client=openai.DefaultAsyncHttpxClient(trust_env=False)
    ) as client:
        return await environment.run(run.task, client)


def _settings(run: HarnessRun) -> dict[str, Any]:
    # no timeout: the model may be slow, and ``run_deadline`` ends what hangs. No retries: a call that is repeated
    # would be answered, and trained on, once more, with an answer to the first that the harness never saw
    return {"base_url": run.base_url, "api_key": run.api_key, "timeout": None, "max_retries": 0}
