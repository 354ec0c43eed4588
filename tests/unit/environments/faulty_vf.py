"""A package for ``verifiers`` that goes wrong as its tasks say, with a harness of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import openai
import verifiers.v1 as vf

FAULTS = ("none", "raise", "nan", "late", "silent", "exit")


class FaultyConfig(vf.TasksetConfig):
    endless: bool = False
    split: str = "train"


class FaultyData(vf.TaskData):
    fault: str


class FaultyTask(vf.Task[FaultyData]):
    @vf.reward
    async def said(self, trace: vf.Trace) -> float:
        return float(trace.last_reply or 0)

    @vf.reward(weight=0.5)
    async def bonus(self, task: FaultyData) -> float:
        if task.fault == "raise":
            raise ValueError("no bonus today")
        return {"nan": float("nan")}.get(task.fault, 2.0)


class FaultyTaskset(vf.Taskset[FaultyTask, FaultyConfig]):
    def load(self) -> Iterator[FaultyTask]:
        for number in itertools.count():
            if number >= len(FAULTS) and not self.config.endless:
                return
            name = f"{self.config.split}-{number}"
            fault = FAULTS[number % len(FAULTS)]
            data = FaultyData(id=name, prompt="How much?", system_prompt="Be short.", fault=fault)
            yield FaultyTask(data, self.config.task)


class FaultyHarness(vf.Harness[vf.HarnessConfig]):
    """Calls the model in this process, with OpenAI's client."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        if data.fault == "late":
            raise TimeoutError("too late")
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        if data.fault != "silent":
            async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
                await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=int(data.fault == "exit"), stdout="", stderr="bad end")


__all__ = ["FaultyHarness", "FaultyTaskset"]
