"""The shop as a harness: a loop around an OpenAI client, written as for any model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron_rl_environments.shop import Shop

from megatron_rl.environments.base import HarnessEnvironment
from megatron_rl.environments.tool_calls import parse
from megatron_rl.types import Demonstration, Grade, Message, Split, Task, Transcript

if TYPE_CHECKING:
    import openai

TURNS = 6


class ShopHarness(HarnessEnvironment, Shop):
    """The shop, by an OpenAI client."""

    max_turns = 1

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.in_process = False

    def run(self, task: Task, client: openai.OpenAI) -> Grade:
        """Asks the model until it calls no tool."""
        import openai

        messages, text, ended = list(task.prompt), "", False
        for _ in range(TURNS):
            try:
                answer = client.chat.completions.create(model="policy", messages=messages, tools=list(self.tools))
            except openai.BadRequestError:  # the conversation is as long as it may be
                ended = False
                break
            said, ended = answer.choices[0].message, answer.choices[0].finish_reason != "length"
            text = said.content or ""
            results = [self._answer(task, call.model_dump()) for call in said.tool_calls or ()]
            results += [_result(f"bad_{n}", f"Error: {e}") for n, e in enumerate(parse(text, self.tools).problems)]
            if not results or not ended:
                break
            messages += [said.model_dump(exclude_none=True), *results]
        else:
            text = ""
        return Shop.grade(self, task, Transcript(text, "stop" if ended else "length", 0))

    def gold_turns(self, task: Task) -> list[str | Message]:
        """The calls as an endpoint gives them, each with an id of its own."""
        *calls, answer = super().gold_turns(task)
        read = [parse(call, self.tools, prefix=f"call_{n}").calls[0].as_message() for n, call in enumerate(calls)]
        return [*({"role": "assistant", "content": None, "tool_calls": [call]} for call in read), answer]

    def demonstrations(self, split: Split) -> Iterator[Demonstration]:
        """None: the endpoint is for models that can call tools."""
        return iter(())

    def _answer(self, task: Task, call: dict[str, Any]) -> Message:
        asked = call["function"]
        written = json.dumps({"name": asked["name"], "arguments": json.loads(asked["arguments"])})
        [made] = parse(f"<tool_call>{written}</tool_call>", self.tools).calls  # which says what is wrong with it
        return _result(call["id"], self._result(task, made)[0])


def _result(number: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": number, "content": text}
