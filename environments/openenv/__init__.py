"""An environment behind an OpenEnv server. One entry of the environment list::

- environment: openenv
  name: wordle
  args:
    url: http://127.0.0.1:8000          # or command: python -m my_env.server --port {port}, started for each sample
    reset: {difficulty: 2}              # said at every reset
    seeds: 4096                         # tasks are the resets with seed 0 to 4095; without it the server's own list
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megatron_rl.environments.base import HarnessEnvironment, split_of
from megatron_rl.types import Grade, Split, Task

from .server import Episode, Refused, Server

if TYPE_CHECKING:
    import openai


class OpenEnv(HarnessEnvironment):
    """An environment of an OpenEnv server: the model reads what is observed and says what is done.

    An observation of one field is shown as that field, another as JSON; ``show`` names the field instead. The model
    answers with an action as JSON, or, where actions have one required field, with the field's text. An action that is
    none is answered with the error. The sample is worth the sum of the rewards of its steps, which end with ``done`` or
    after ``max_steps``.
    """

    name = "openenv"
    reward_range = (0.0, None)

    def __init__(
        self,
        *,
        url: str = "",
        command: str = "",
        seeds: int = 0,
        reset: Mapping[str, Any] | None = None,
        show: str = "",
        system: str = "",
        max_steps: int = 32,
    ) -> None:
        if bool(url) == bool(command):
            raise ValueError("give one of url, of a server that runs, and command, which starts one on a {port}")
        if command and "{port}" not in command:
            raise ValueError(f"command {command!r} does not say where {{port}} goes")
        self._server = Server(url.rstrip("/"), command)
        self._seeds, self._reset, self._show, self._system = seeds, dict(reset or {}), show, system
        self._max_steps = max_steps

    def tasks(self, split: Split) -> Iterator[Task]:
        """The resets with a seed each, one in 16 held out; or what the server lists for the split."""
        if not self._seeds:
            specs = asyncio.run(self._server.tasks(split))
        for index in range(self._seeds or len(specs)):
            if self._seeds:
                name, reset = f"seed-{index}", {"seed": index}
                if split_of(name) != split:
                    continue
            else:
                spec = specs[index]
                own = spec.get("id") if isinstance(spec, Mapping) else None
                name, reset = str(own or f"{split}-{index}"), {"split": split, "index": index}
            yield Task(name, ({"role": "user", "content": name},), {"reset": self._reset | reset})

    async def run(self, task: Task, client: openai.AsyncOpenAI) -> Grade:
        """One episode."""
        async with self._server.episode(task.data["reset"]) as (episode, result):
            return await self._play(episode, result, client)

    async def _play(self, episode: Episode, result: Mapping[str, Any], client: openai.AsyncOpenAI) -> Grade:
        messages = [{"role": "system", "content": self._system}] if self._system else []
        read, rewards, bad, steps = self._shown(result), [], 0, 0
        while not result.get("done") and steps < self._max_steps:
            messages.append({"role": "user", "content": read})
            reply = await _reply(client, messages)
            if reply is None:
                break
            messages.append({"role": "assistant", "content": reply})
            steps += 1
            try:
                result = await episode.ask("step", _action(reply, episode.action_schema))
                read = self._shown(result)
                rewards += [] if result.get("reward") is None else [float(result["reward"])]
            except Refused as refusal:
                bad, read = bad + 1, f"error: {refusal}"
        if result.get("done") and not rewards:
            raise RuntimeError("the episode is done, and the server gave no reward at any step")
        metadata = result.get("metadata") or {}
        metrics = {name: value for name, value in metadata.items() if isinstance(value, int | float)}
        metrics |= {"steps": steps, "bad_actions": bad}
        return Grade(sum(rewards), metrics, "done" if result.get("done") else "cut")

    def _shown(self, result: Mapping[str, Any]) -> str:
        """What the model reads of an observation."""
        observed = {name: value for name, value in result["observation"].items() if name != "metadata"}
        if self._show:
            if self._show not in observed:
                raise KeyError(f"an observation has no field {self._show!r} to show, only {', '.join(observed)}")
            observed = {self._show: observed[self._show]}
        only = next(iter(observed.values())) if len(observed) == 1 else None
        return only if isinstance(only, str) else json.dumps(observed, ensure_ascii=False)


async def _reply(client: openai.AsyncOpenAI, messages: list[dict[str, str]]) -> str | None:
    """What the model says; None where the conversation has filled its context."""
    import openai

    try:
        answer = await client.chat.completions.create(model="policy", messages=messages)
    except openai.BadRequestError as error:
        if error.code != "context_length_exceeded":
            raise
        return None
    return answer.choices[0].message.content or ""


def _action(reply: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The action of a reply: a JSON object, or the text of the one field that an action must have.

    Raises:
        Refused: it is neither.
    """
    try:
        action = json.loads(reply)
    except ValueError:
        action = reply
    if isinstance(action, dict):
        return action
    required = schema.get("required", ())
    if len(required) != 1:
        raise Refused(f"an action is a JSON object with {', '.join(required) or 'what the environment asks for'}")
    return {required[0]: reply}
