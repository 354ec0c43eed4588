"""The OpenAI clients that harnesses are handed. Imported before workers are forked: it takes 0.6 s."""

from __future__ import annotations

import importlib
from typing import Any

import httpx
import openai

from megatron_rl.types import HarnessRun

for _module in ("openai.resources.chat.completions", "openai.resources.completions", "anyio._backends._asyncio"):
    importlib.import_module(_module)  # what the first call would import

_TLS = httpx.create_ssl_context(trust_env=False)
"""Reading the certificates takes 15 ms, which every client would do for itself."""


def client_of(run: HarnessRun) -> openai.OpenAI:
    """The client of a harness with ``def run``."""
    return openai.OpenAI(**_settings(run), http_client=openai.DefaultHttpxClient(verify=_TLS, trust_env=False))


def async_client_of(run: HarnessRun) -> openai.AsyncOpenAI:
    """The client of a harness with ``async def run``."""
    return openai.AsyncOpenAI(
        **_settings(run), http_client=openai.DefaultAsyncHttpxClient(verify=_TLS, trust_env=False)
    )


def _settings(run: HarnessRun) -> dict[str, Any]:
    # no timeout: the model may be slow, and ``run_deadline`` ends what hangs. No retries: a call that is repeated
    # would be answered, and trained on, once more, with an answer to the first that the harness never saw
    return {"base_url": run.base_url, "api_key": run.api_key, "timeout": None, "max_retries": 0}
