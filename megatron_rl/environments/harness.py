"""One sample of a harness: the OpenAI client that it is handed, and what comes of it.

Imported where a harness runs, as graders do without its extra, and before workers are forked: it takes 0.6 s.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import httpx
import openai

from megatron_rl.environments.base import HarnessEnvironment
from megatron_rl.environments.results import checked_grade, grade_or_failure
from megatron_rl.types import Grade, HarnessRun, Task

for _module in ("openai.resources.chat.completions", "openai.resources.completions", "anyio._backends._asyncio"):
    importlib.import_module(_module)  # what the first call would import

# reading the certificates takes 15 ms, which every client would do for itself
_HTTP = {"verify": httpx.create_ssl_context(trust_env=False), "trust_env": False}


def run_harness(environment: HarnessEnvironment, run: HarnessRun) -> Grade:
    """Return the verdict on one sample, whatever the author's code does; the client's key is in no part of it."""
    result = grade_or_failure(environment, run.task, lambda: checked_grade(_reward(environment, run)))
    texts = {"message": result.message, "status": result.status, "extracted": result.extracted}
    return replace(result, **{name: text and text.replace(run.api_key, "[key]") for name, text in texts.items()})


def _reward(environment: HarnessEnvironment, run: HarnessRun) -> float | Grade:
    # no timeout: the model may be slow, and ``run_deadline`` ends what hangs. No retries: a call that is repeated
    # would be answered, and trained on, once more, with an answer to the first that the harness never saw
    settings = {"base_url": run.base_url, "api_key": run.api_key, "timeout": None, "max_retries": 0}
    if inspect.iscoroutinefunction(environment.run):
        return asyncio.run(_awaited(environment, run.task, settings))
    with openai.OpenAI(**settings, http_client=openai.DefaultHttpxClient(**_HTTP)) as client:
        return environment.run(run.task, client)


async def _awaited(environment: HarnessEnvironment, task: Task, settings: Mapping[str, Any]) -> float | Grade:
    async with openai.AsyncOpenAI(**settings, http_client=openai.DefaultAsyncHttpxClient(**_HTTP)) as client:
        return await environment.run(task, client)
