"""Which tasks an evaluation has: those of every environment that has some, as long as there is one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_rl.errors import EnvironmentFault
from megatron_rl.run.environments import EnvironmentAccess
from megatron_rl.types import Task

TOKENIZER = SimpleNamespace(encode_prompt=lambda prompt, environment: list(range(len(prompt))))


def _access(**prompts: list[str]) -> EnvironmentAccess:
    tasks = {name: [Task(f"{name}-{text}", text) for text in texts] for name, texts in prompts.items()}
    client = SimpleNamespace(fetch_tasks=lambda name, split: tasks[name])
    return EnvironmentAccess([SimpleNamespace(name=name, eval_prompts=None) for name in prompts], client, None)


def test_an_environment_without_any_is_passed_over():
    found = _access(trained=[], measured=["ab", "abcdef", "c"]).held_out_tasks(8, TOKENIZER, max_prompt_tokens=4)
    assert [(one.environment, one.task.prompt) for one in found] == [("measured", "ab"), ("measured", "c")]


def test_tasks_that_are_all_too_long_are_a_fault():
    with pytest.raises(EnvironmentFault, match="'measured' has no held-out task that fits in 4 tokens"):
        _access(measured=["abcdef"], other=["a"]).held_out_tasks(8, TOKENIZER, max_prompt_tokens=4)
