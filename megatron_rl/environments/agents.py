"""Agents of a harness: roles of one sample that the same policy plays, each with its own reward and group.

    /sessions/ID/v1                   the address of the sample's client: its calls are of the agent ``main``
    /sessions/ID/agents/planner/v1    the same sample, for the agent ``planner``
"""

from __future__ import annotations

import re
from typing import TypeVar

from megatron_rl.errors import shorten

MAIN = "main"
MOST = 8
"""Agents of one sample."""
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")

AnyClient = TypeVar("AnyClient")
"""``openai.OpenAI`` or ``openai.AsyncOpenAI``."""


def name_problem(name: str) -> str:
    """Return why an agent cannot have this name; empty where it can."""
    if _NAME.fullmatch(name):
        return ""
    return f"{shorten(name)} is no name of an agent; use up to 32 of a to z, 0 to 9, _ and -, and begin with a letter"


def client_of(client: AnyClient, name: str) -> AnyClient:
    """Return a client of the same sample whose calls are of the agent ``name``.

    Raises:
        ValueError: the name is not one.
    """
    if problem := name_problem(name):
        raise ValueError(problem)
    sample = str(client.base_url).rstrip("/").removesuffix("/v1").partition("/agents/")[0]
    return client.with_options(base_url=f"{sample}/v1" if name == MAIN else f"{sample}/agents/{name}/v1")
