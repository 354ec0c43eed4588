"""The shop by a code agent of smolagents, which calls the model at `/v1/chat/completions`.

    - {environment: "examples/agents/smolagents_agent.py:ShopAgent", name: shop}

The model writes Python, which smolagents interprets in the sample's process: no imports that matter, but no sandbox.
"""

from __future__ import annotations

import openai
from megatron_rl_environments.shop import Shop
from megatron_rl_environments.shop.harness import TURNS, ShopHarness
from smolagents import AgentGenerationError, CodeAgent, LogLevel, OpenAIServerModel, tool
from smolagents.agents import EMPTY_PROMPT_TEMPLATES
from smolagents.models import MessageRole

from megatron_rl.types import Grade, Task, Transcript

SYSTEM = (
    "Write Python between <code> and </code>. search(query) returns the price of one of the goods; print shows you a "
    "value; final_answer(number) ends."
)
SENT_AS = {MessageRole.TOOL_CALL: MessageRole.USER, MessageRole.TOOL_RESPONSE: MessageRole.USER}
"""By default smolagents writes the call that it has read into the model's message: an edit, so a new sequence."""


class ShopAgent(ShopHarness):
    """The shop, by a code agent of smolagents."""

    def run(self, task: Task, client: openai.OpenAI) -> Grade:
        """Run the agent; a full context is a wrong answer."""

        @tool
        def search(query: str) -> str:
            """The price of one of the goods.

            Args:
                query: its name
            """
            return self.search(query, task)

        model = OpenAIServerModel(
            "policy", api_base=str(client.base_url), api_key=client.api_key, client_kwargs={"max_retries": 0},
            custom_role_conversions=SENT_AS, flatten_messages_as_text=True,
        )  # fmt: skip
        prompts = EMPTY_PROMPT_TEMPLATES | {"system_prompt": SYSTEM}
        agent = CodeAgent([search], model, prompts, max_steps=TURNS, verbosity_level=LogLevel.OFF)
        try:
            answer = str(agent.run(task.prompt[0]["content"]))
        except AgentGenerationError as error:
            if not isinstance(error.__cause__, openai.BadRequestError):
                raise
            answer = ""
        return Shop.grade(self, task, Transcript(answer, "stop", 0))

    def gold_turns(self, task: Task) -> list[str]:
        """Prints the prices, then answers with the sum."""
        prices = "\n".join(f"print(search({name!r}))" for name in task.data["prices"])
        return [f"<code>\n{prices}\n</code>", f"<code>\nfinal_answer({task.data['sum']})\n</code>"]
