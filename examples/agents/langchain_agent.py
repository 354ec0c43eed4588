"""The shop by an agent of LangChain, which calls the model at `/v1/chat/completions`.

    - {environment: "examples/agents/langchain_agent.py:ShopAgent", name: shop}
"""

from __future__ import annotations

import openai
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from megatron_rl_environments.shop import Shop
from megatron_rl_environments.shop.harness import TURNS, ShopHarness

from megatron_rl.types import Grade, Task, Transcript


class ShopAgent(ShopHarness):
    """The shop, by an agent of LangChain."""

    def run(self, task: Task, client: openai.OpenAI) -> Grade:
        """Run the agent; turns without end and a full context are wrong answers."""

        @tool
        def search(query: str) -> str:
            """The price of one of the goods."""
            return self.search(query, task)

        @tool
        def python(code: str) -> str:
            """Runs a Python program and returns what it prints."""
            return self.python(code)

        model = ChatOpenAI(model="policy", base_url=str(client.base_url), api_key=client.api_key, max_retries=0)
        agent = create_agent(model, [search, python])
        try:
            # A turn is two steps of the graph: the model, and its tools.
            state = agent.invoke({"messages": list(task.prompt)}, {"recursion_limit": 2 * TURNS})
            answer = state["messages"][-1].text
        except (GraphRecursionError, openai.BadRequestError):
            answer = ""
        return Shop.grade(self, task, Transcript(answer, "stop", 0))
