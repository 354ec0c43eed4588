"""Run other people's clients against `megatron-rl serve` and write the table of docs/endpoint.md.

    python tools/clients.py http://127.0.0.1:8000/v1 TOKEN_FILE MODEL_DIRECTORY

Install the clients to be tried. One that is missing, or fails, has its reason in the table. The server needs a chat
template with tools and `--rl-tool-call-parser`; what a small model says is not judged.
"""

import importlib.metadata
import json
import os
import sys
from collections.abc import Callable

from pydantic import BaseModel

ASK = "Tell me of Paris."


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class City(BaseModel):
    name: str
    country: str
    inhabitants: int


class Clients:
    """A method a client; what it returns stands in the table."""

    def __init__(self, url: str, token: str, model_directory: str) -> None:
        self._url, self._token, self._directory = url, token, model_directory

    def instructor(self) -> str:
        import instructor
        import openai

        for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
            client = instructor.from_openai(openai.OpenAI(base_url=self._url, api_key=self._token), mode=mode)
            messages = [{"role": "user", "content": ASK}]
            ask = {"model": "policy", "messages": messages, "temperature": 0}
            client.chat.completions.create(**ask, response_model=City, max_retries=0)
        return "typed answers by JSON schema and by a forced call"

    def langchain_openai(self) -> str:
        from langchain_openai import ChatOpenAI

        for method in ("json_schema", "function_calling"):
            chat = ChatOpenAI(base_url=self._url, api_key=self._token, model="policy", temperature=0)
            assert isinstance(chat.with_structured_output(City, method=method).invoke(ASK), City)
        return "`with_structured_output` by JSON schema and by a forced call"

    def smolagents(self) -> str:
        from smolagents import OpenAIServerModel, ToolCallingAgent, tool

        @tool
        def add(a: int, b: int) -> int:
            """Add two numbers.

            Args:
                a: the first
                b: the second
            """
            return a + b

        model = OpenAIServerModel("policy", api_base=self._url, api_key=self._token, temperature=0, max_tokens=128)
        agent = ToolCallingAgent(tools=[add], model=model, max_steps=2, verbosity_level=0)
        agent.run("What is 2 + 3?")
        return "`ToolCallingAgent` with calls that it forces"

    def anthropic(self) -> str:
        import anthropic

        client = anthropic.Anthropic(base_url=self._url.removesuffix("/v1"), api_key=self._token)
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        tools = [{"name": "add", "description": "Adds one.", "input_schema": schema}]
        asked = {"model": "policy", "max_tokens": 64, "messages": [{"role": "user", "content": "What is 2 + 1?"}]}
        forced = client.messages.create(**asked, tools=tools, tool_choice={"type": "tool", "name": "add"})
        assert forced.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": forced.content[-1].id, "content": "3"}
        messages = [*asked["messages"], {"role": "assistant", "content": forced.content}]
        asked["messages"] = [*messages, {"role": "user", "content": [result]}]
        with client.messages.stream(**asked, tools=tools) as stream:
            usage = stream.get_final_message().usage
        counted = client.messages.count_tokens(model="policy", messages=asked["messages"], tools=tools)
        assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
        return "a forced call, its result, a stream, `count_tokens`"

    def openai(self) -> str:
        import openai

        client = openai.OpenAI(base_url=self._url, api_key=self._token)
        assert client.responses.parse(model="policy", input=ASK, text_format=City).output_parsed is not None
        events = list(client.responses.create(model="policy", input=ASK, max_output_tokens=32, stream=True))
        assert events[-1].type in ("response.completed", "response.incomplete")
        return "`responses.parse` by JSON schema, a stream of responses"

    def openai_agents(self) -> str:
        import agents
        import openai

        agents.set_tracing_disabled(True)
        client = openai.AsyncOpenAI(base_url=self._url, api_key=self._token)
        model = agents.OpenAIResponsesModel("policy", client)
        agent = agents.Agent("adder", model=model, tools=[agents.function_tool(add)])
        agents.Runner.run_sync(agent, "What is 2 + 3?", max_turns=8)
        return "`Runner` with tools, by `OpenAIResponsesModel`"

    def pydantic_ai_slim(self) -> str:
        import openai
        from pydantic_ai import Agent
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        client = openai.AsyncOpenAI(base_url=self._url, api_key=self._token)
        model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))
        assert isinstance(Agent(model, output_type=City).run_sync(ASK).output, City)
        Agent(model, tools=[add]).run_sync("What is 2 + 3?")
        return "`Agent` with tools, and typed answers by a forced call"

    def langchain(self) -> str:
        from langchain.agents import create_agent
        from langchain_openai import ChatOpenAI

        chat = ChatOpenAI(base_url=self._url, api_key=self._token, model="policy", temperature=0)
        create_agent(chat, [add]).invoke({"messages": [{"role": "user", "content": "What is 2 + 3?"}]})
        return "`create_agent` with tools"

    def lm_eval(self) -> str:
        import torch
        import transformers
        from lm_eval.api.instance import Instance
        from lm_eval.models.openai_completions import LocalCompletionsAPI

        pairs = [("The capital of France is", " Paris"), ("2 + 2 =", " 4"), ("Once upon a time", " there was a")]
        os.environ["OPENAI_API_KEY"] = self._token
        client = LocalCompletionsAPI(
            model="policy", base_url=f"{self._url}/completions", tokenizer=self._directory, batch_size=2,
            tokenizer_backend="huggingface", header={"Authorization": f"Bearer {self._token}"},
        )  # fmt: skip
        found = client.loglikelihood([Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(pairs)])
        tokenizer = transformers.AutoTokenizer.from_pretrained(self._directory)
        model = transformers.AutoModelForCausalLM.from_pretrained(self._directory, dtype=torch.float32)
        largest = 0.0
        for (context, continuation), (logprob, _) in zip(pairs, found, strict=True):
            start, ids = len(tokenizer(context)["input_ids"]), tokenizer(context + continuation)["input_ids"]
            with torch.no_grad():
                known = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            own = sum(known[place - 1, ids[place]].item() for place in range(start, len(ids)))
            largest = max(largest, abs(own - logprob))
        return f"`local-completions`, log-likelihoods within {largest:.0e} of transformers'"


def row(name: str, client: Callable[[], str]) -> str:
    try:
        version = importlib.metadata.version(name.replace("_", "-"))
        return f"| {name.replace('_', '-')} {version} | {client()} |"
    except Exception as error:  # noqa: BLE001 - clients raise whatever their authors chose
        return f"| {name.replace('_', '-')} | {type(error).__name__}: {json.dumps(str(error)[:200])} |"


def main() -> None:
    url, token_file, directory = sys.argv[1:]
    with open(token_file) as file:
        clients = Clients(url, file.read().strip(), directory)
    print("| client | what works |\n|---|---|")
    for name in (
        "anthropic", "openai", "openai_agents", "instructor", "langchain", "langchain_openai", "pydantic_ai_slim",
        "smolagents", "lm_eval",
    ):  # fmt: skip
        print(row(name, getattr(clients, name)), flush=True)


if __name__ == "__main__":
    main()
