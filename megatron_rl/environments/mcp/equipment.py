"""Gives an environment the tools of a server; one that grades an answer then grades the last turn."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron_rl.environments.base import Environment
from megatron_rl.environments.mcp.client import START_SECONDS, ToolServer
from megatron_rl.environments.mcp.settings import ServerSettings
from megatron_rl.environments.tool_calls import checked_tools
from megatron_rl.environments.tools import CallFailed, ToolEnvironment
from megatron_rl.errors import ConfigError
from megatron_rl.types import Step, Task, Turn


def with_tools(found: type[Environment]) -> type[Environment]:
    """Make the class that `equip` can give a server to."""
    bases = (_Equipped, found) if issubclass(found, ToolEnvironment) else (_Equipped, ToolEnvironment, found)
    own = {"grade": found.grade, "__doc__": found.__doc__, "__module__": found.__module__}
    return type(found.__name__, bases, own)


def equip(environment: Any, settings: ServerSettings) -> None:
    """Give an environment the tools that the server lists now, which is ended again until a call is made.

    Raises:
        ConfigError: the server does not answer, or what it lists cannot be shown to a model.
    """
    given = settings.for_workers()
    try:
        with contextlib.closing(ToolServer(given)) as server:
            tools = server.tools()
        checked_tools([*environment.tools, *tools])
    except (CallFailed, ValueError) as error:
        advice = "; start it first" if settings.url else "; run it by hand to see why"
        who = f"mcp of {environment.name} ({settings.url or shlex.join(settings.command)})"
        raise ConfigError([f"{who}: {error}{advice if isinstance(error, CallFailed) else ''}"]) from error
    environment.mcp_add({"settings": given, "tools": tools})
    environment.in_process = False  # a call waits, and the server of environments has others to answer
    environment.grade_deadline += START_SECONDS + settings.deadline


class _Equipped:
    """Goes before the class of an environment that has a server. Its names are none that an author would choose."""

    def mcp_add(self, served: Mapping[str, Any]) -> None:
        """Add the tools of a server; ``served`` is JSON, with which a worker does the same."""
        self.mcp_served, self.mcp_server = served, ToolServer(served["settings"])
        names = [schema["function"]["name"] for schema in served["tools"]]
        self._tools = {**self._tools, **{name: _Tool(self.mcp_server, name) for name in names}}
        self.tools = (*self.tools, *served["tools"])

    def step(self, task: Task, state: Any, turn: Turn) -> Step:
        """See ``ToolEnvironment.step``; the server's calls have the time of one turn."""
        self.mcp_server.begin_turn()
        return super().step(task, state, turn)


class _Tool(NamedTuple):
    server: ToolServer
    name: str

    def run(self, environment: Environment, task: Task, arguments: Mapping[str, Any]) -> str:
        return self.server.call(self.name, arguments)
