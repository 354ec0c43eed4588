"""The shop by openai-agents, which calls the model at `/v1/responses`.

    - {environment: "examples/agents/openai_agents.py:ShopAgent", name: shop}
"""

from __future__ import annotations

import agents
import openai
from megatron_rl_environments.shop import Shop
from megatron_rl_environments.shop.harness import TURNS, ShopHarness

from megatron_rl.types import Grade, Task, Transcript

agents.set_tracing_disabled(True)  # traces would go to OpenAI


class ShopAgent(ShopHarness):
    """The shop, by an agent of openai-agents."""

    async def run(self, task: Task, client: openai.AsyncOpenAI) -> Grade:
        """Run the agent; turns without end and a full context are wrong answers."""

        @agents.function_tool
        def search(query: str) -> str:
            """The price of one of the goods."""
            return self.search(query, task)

        @agents.function_tool
        def python(code: str) -> str:
            """Runs a Python program and returns what it prints."""
            return self.python(code)

        model = agents.OpenAIResponsesModel("policy", client)
        agent = agents.Agent("shop", model=model, tools=[search, python])
        try:
            result = await agents.Runner.run(agent, list(task.prompt), max_turns=TURNS)
            answer = result.final_output
        except (agents.MaxTurnsExceeded, agents.ModelBehaviorError, openai.BadRequestError):
            answer = ""
        return Shop.grade(self, task, Transcript(answer, "stop", 0))
