"""The shop's questions as a package of ``verifiers``: a taskset, and a harness that calls the model in its own process.

    - environment: verifiers
      name: shop
      args: {package: examples/agent_tools/shop_vf.py, args: {shop: {seed: 1}}, test_args: {split: test}}

Tasks and tools are those of ``environments/shop``. The harness is what anyone writes around OpenAI's client. verifiers'
own, ``null``, could have the tools from a server that it starts for each sample: three seconds of a processor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import verifiers.v1 as vf
from megatron_rl_environments.shop import Shop, computed

from megatron_rl.environments.sandbox import python_tool
from megatron_rl.environments.tool_calls import parse

TOOLS = list(Shop.tools)


class ShopConfig(vf.TasksetConfig):
    split: str = "train"
    shop: dict[str, Any] = {}
    """Options of ``environments/shop``."""


class ShopData(vf.TaskData):
    prices: dict[str, int]
    answer: str
    sandbox: bool = False


class ShopTask(vf.Task[ShopData]):
    @vf.reward
    async def right(self, task: ShopData, trace: vf.Trace) -> float:
        return float(trace.info["answer"].strip() == task.answer)

    @vf.metric
    async def tool_calls(self, trace: vf.Trace) -> float:
        return sum(len(message.tool_calls or ()) for message in trace.assistant_messages)


class ShopTaskset(vf.Taskset[ShopTask, ShopConfig]):
    def load(self) -> Iterator[ShopTask]:
        for task in Shop(**self.config.shop).tasks(self.config.split):
            known = {name: task.data[name] for name in ("prices", "answer")}
            known["sandbox"] = self.config.shop.get("sandbox", False)
            yield ShopTask(ShopData(id=task.id, prompt=task.prompt[0]["content"], **known), self.config.task)


class ShopHarness(vf.Harness[vf.HarnessConfig]):
    """Up to six turns; the first without a call is the answer."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        trace.info["answer"] = ""
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(Shop.max_turns):
                try:
                    answer = await client.chat.completions.create(model=ctx.model, messages=messages, tools=TOOLS)
                except openai.BadRequestError:  # there is no room for another turn
                    break
                said, cut = answer.choices[0].message, answer.choices[0].finish_reason == "length"
                text = said.content or ""
                results = [(call.id, result_of(data, call.function)) for call in said.tool_calls or ()]
                results += [(f"bad_{n}", f"Error: {why}") for n, why in enumerate(parse(text, TOOLS).problems)]
                if not results or cut:
                    trace.info["answer"] = "" if cut else text
                    break
                messages.append(said)
                messages += [{"role": "tool", "tool_call_id": number, "content": read} for number, read in results]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def result_of(data: ShopData, called: Any) -> str:
    """What the model reads of a call."""
    written = json.dumps({"name": called.name, "arguments": json.loads(called.arguments)})
    [call] = parse(f"<tool_call>{written}</tool_call>", TOOLS).calls  # which says what is wrong with it
    if call.problem:
        return f"Error: {call.problem}"
    if call.name == "search":
        return str(data.prices.get(call.arguments["query"], "?"))
    return (python_tool()[1] if data.sandbox else computed)(call.arguments["code"])


__all__ = ["ShopHarness", "ShopTaskset"]
