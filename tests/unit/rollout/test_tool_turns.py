"""Tools in a rollout: calls with their special tokens reach the environment, results are read and not learned."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megatron_rl.chat import ChatFormat
from megatron_rl.environments.results import judge
from megatron_rl.environments.tools import ToolEnvironment, tool
from megatron_rl.platform.groups import ParallelGroups
from megatron_rl.rollout.conversations import ConversationSettings
from megatron_rl.rollout.rollouter import Rollouter
from megatron_rl.signals import StopRequest
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Completion, Grade, Prompt, Request, SamplingParams, SourcedTask, Task, Turn
from tests.support.endpoint import byte_tokenizer
from tests.support.engines import QueuedEngine

TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}assistant:"
    "{% endif %}{% if false %}<|python_tag|>{% endif %}"
)
CALL = '<|python_tag|>{"name": "add", "parameters": {"a": 2, "b": 2}}'


class Sums(ToolEnvironment):
    """Adds."""

    name = "sums"

    def tasks(self, split: str):
        return ()

    @tool
    def add(self, a: int, b: int) -> int:
        return a + b

    def grade(self, task: Task, transcript) -> float:
        return float(transcript.text == "4")


class ScriptedEngine(QueuedEngine):
    """Says one text after the other."""

    def __init__(self, tokenizer: Tokenizer, *said: str) -> None:
        super().__init__()
        self._answers = [(*tokenizer.encode(text), tokenizer.end_token_id) for text in said]

    def answer(self, request: Request) -> tuple[Completion, ...]:
        ids = self._answers.pop(0)
        return (Completion(ids, (-1.0,) * len(ids), "stop", 0),)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """As Llama's: <|python_tag|> is special, so plain decoding leaves it out."""
    byte_tokenizer(tmp_path, TEMPLATE)
    backend = AutoTokenizer.from_pretrained(tmp_path)
    backend.add_special_tokens({"additional_special_tokens": ["<|python_tag|>"]})
    return Tokenizer(backend, "llama").formatting(by_environment={"sums": ChatFormat(tools=Sums.tools)})


def converse(tokenizer: Tokenizer, groups: ParallelGroups, prompt: Prompt, *said: str):
    """The rollout, the prompts of its turns, and what the environment was asked."""
    turns: list[Turn] = []

    async def step(environment: str, items: Sequence[tuple[Task, Any, Turn]]) -> list[Grade]:
        await asyncio.sleep(0)
        turns.extend(turn for *_, turn in items)
        return [judge(Sums(), item) for item in items]

    engine, settings = ScriptedEngine(tokenizer, *said), ConversationSettings({"sums": 4}, 1000)
    rollouter = Rollouter(engine, tokenizer, groups, step, StopRequest(), 0.0, settings)
    try:
        ids = tuple(tokenizer.encode_prompt(prompt, "sums"))
        request = Request(SourcedTask("sums", Task("0", prompt)), ids, 1, SamplingParams(max_new_tokens=200))
        [group] = rollouter.run([request], 0, 0, None).groups
    finally:
        rollouter.close()
    return group.rollouts[0], [request.prompt_ids for request in engine.requests], turns


def test_a_call_in_a_chat_is_read_by_the_templates_parser(tokenizer: Tokenizer, one_rank: ParallelGroups) -> None:
    prompt = ({"role": "user", "content": "2+2?"},)
    rollout, prompts, turns = converse(tokenizer, one_rank, prompt, CALL, "4")
    assert (turns[0].text, turns[0].tool_call_parser) == (CALL, "llama")
    assert tokenizer.decode_raw(prompts[0]) == "[add]user:2+2?<|end|>assistant:"
    assert tokenizer.decode_raw(prompts[1]) == (
        f"[add]user:2+2?<|end|>assistant:{CALL}<|end|>tool:4<|end|>assistant:"
    )
    assert rollout.grade == Grade(1.0, {"tool_calls": 1.0, "bad_tool_calls": 0.0}, correct=True)
    ids, [(start, end)] = rollout.completion.token_ids, rollout.completion.environment_spans
    assert tokenizer.decode_raw(ids[start:end]) == "tool:4<|end|>assistant:", "no part of the loss"
    assert tokenizer.decode_raw(ids[:start] + ids[end:]) == f"{CALL}<|end|>4<|end|>"


def test_a_bad_call_is_answered_and_the_conversation_goes_on(tokenizer: Tokenizer, one_rank: ParallelGroups) -> None:
    prompt = ({"role": "user", "content": "2+2?"},)
    rollout, prompts, _ = converse(tokenizer, one_rank, prompt, CALL.replace("add", "sum"), CALL[:-1], "4")
    assert "tool:Error: there is no function 'sum'" in tokenizer.decode_raw(prompts[1])
    assert "tool:Error: a call cannot be read: " in tokenizer.decode_raw(prompts[2])
    assert rollout.grade == Grade(1.0, {"tool_calls": 2.0, "bad_tool_calls": 2.0}, correct=True)


def test_after_plain_text_calls_and_results_are_text(tokenizer: Tokenizer, one_rank: ParallelGroups) -> None:
    call = Sums().call("add", a=2, b=2)
    rollout, prompts, turns = converse(tokenizer, one_rank, "2+2=", call, "4")
    assert turns[0].tool_call_parser == "" and rollout.grade.reward == 1.0
    assert tokenizer.decode_raw(prompts[1]) == f"2+2={call}<|end|>\n<tool_response>\n4\n</tool_response>\n"
