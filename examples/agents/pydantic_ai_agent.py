"""The shop by an agent of Pydantic AI, which calls the model at `/v1/chat/completions`.

    - {environment: "examples/agents/pydantic_ai_agent.py:ShopAgent", name: shop}
"""

from __future__ import annotations

import openai
from megatron_rl_environments.shop import Shop
from megatron_rl_environments.shop.harness import TURNS, ShopHarness
from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelHTTPError, UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

from megatron_rl.types import Grade, Task, Transcript


class ShopAgent(ShopHarness):
    """The shop, by an agent of Pydantic AI."""

    async def run(self, task: Task, client: openai.AsyncOpenAI) -> Grade:
        """Run the agent; turns without end and a full context are wrong answers."""
        agent = Agent(OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client)))

        @agent.tool_plain
        def search(query: str) -> str:
            """The price of one of the goods."""
            return self.search(query, task)

        @agent.tool_plain
        def python(code: str) -> str:
            """Runs a Python program and returns what it prints."""
            return self.python(code)

        try:
            result = await agent.run(task.prompt[0]["content"], usage_limits=UsageLimits(request_limit=TURNS))
            answer = result.output
        except (UsageLimitExceeded, UnexpectedModelBehavior):
            answer = ""
        except ModelHTTPError as error:
            if error.status_code != 400:
                raise
            answer = ""
        return Shop.grade(self, task, Transcript(answer, "stop", 0))
