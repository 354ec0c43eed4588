"""Chats that a template refuses: one error, one line, whatever the template raises; rows with one are left out."""

from __future__ import annotations

import logging
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rl.chat import ChatFormat
from megatron_rl.errors import ChatRefused, EnvironmentFault
from megatron_rl.rollout.prompt_source import PromptSource, TaskPool
from megatron_rl.run.environments import EnvironmentAccess
from megatron_rl.tokenizer import Tokenizer, load_tokenizer
from megatron_rl.trainer.supervised import DemonstrationSource
from megatron_rl.types import Demonstration, LaterTurn, Prompt, Task
from tests.support.chat_templates import CHATML
from tests.support.chats import STRICT, chat

ROOT = Path(__file__).parents[3]
FINE = chat("user: a")
SYSTEM, DOUBLE, OPENING = chat("system: s", "user: a"), chat("user: a", "user: b"), chat("assistant: a", "user: b")
NOT_SUPPORTED = "the chat template refuses system, user, 'a': TemplateError: System role not supported, line 3"


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    runpy.run_path(str(ROOT / "examples" / "dapo_pipeline_check" / "make_tokenizer.py"))["main"](folder)
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def strict(bytewise: Tokenizer) -> Tokenizer:
    return bytewise.formatting(ChatFormat(STRICT))


TOOLS, MANY = chat("user: a", "tool: 3", "tool: 4"), chat("user: a") * 999


@pytest.mark.parametrize("messages", [SYSTEM, DOUBLE, OPENING, TOOLS, MANY])
def test_a_refusal_names_the_roles_and_the_reason(strict: Tokenizer, messages: Prompt) -> None:
    strict.encode_prompt(FINE)
    with pytest.raises(ChatRefused) as refused:
        strict.encode_prompt(messages)
    line = str(refused.value)
    roles = ", ".join(message["role"] for message in messages[:2])
    assert line.startswith(f"the chat template refuses {roles}")
    assert "TemplateError: System role" in line or "TemplateError: Conversation roles must alternate" in line
    assert "\n" not in line and len(line) < 400


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no ' * 9999) }}", "TemplateError: no no no"),
        ("{{ raise_exception(messages) }}", "TemplateError: "),
        ("{% for m in messages %}", "TemplateSyntaxError: "),
        ("{{ 'a' | no_such_filter }}", "TemplateAssertionError: No filter named 'no_such_filter'"),
        ("\n{{ no_such_function() }}", "UndefinedError: 'no_such_function' is undefined, line 2"),
        ("{{ messages[0].there.not }}", "UndefinedError: "),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError: "),
        ("{% include 'other' %}", "TypeError: no loader for this environment specified"),
        ("{{ 1 // 0 }}", "ZeroDivisionError: "),
        ("{{ range(999999) }}", "OverflowError: Range too big"),
        ("{{ [0] * 10 ** 17 }}", "MemoryError: no reason given"),
        (3, ": "),
    ],
)
def test_whatever_a_template_raises_is_one_line(bytewise: Tokenizer, template: str, reason: str) -> None:
    with pytest.raises(ChatRefused) as refused:
        bytewise.formatting(ChatFormat(template)).render(FINE)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 450


def test_a_reply_that_the_template_rewrites_is_refused_too(bytewise: Tokenizer, strict: Tokenizer) -> None:
    assert strict.encode_reply(FINE, FINE, True)
    for tokenizer in (strict, bytewise.formatting(ChatFormat("{{ messages[-1].content }}"))):
        with pytest.raises(ChatRefused):
            tokenizer.encode_reply(FINE, DOUBLE, True)


def _source(tokenizer: Tokenizer, *prompts: Prompt) -> PromptSource:
    pool = TaskPool("talk", [Task(f"id{number}", prompt) for number, prompt in enumerate(prompts)], 1.0)
    return PromptSource([pool], lambda task, name: tokenizer.encode_prompt(task.prompt, name), 100, 0)


def test_refused_prompts_are_skipped_counted_and_told_once(strict: Tokenizer, caplog) -> None:
    prompts = (FINE, SYSTEM, FINE, SYSTEM, DOUBLE, FINE)
    source, again = _source(strict, *prompts), _source(strict, *prompts)
    with caplog.at_level(logging.INFO, logger="megatron_rl"):
        drawn = source.draw(6)
    assert [one.task.id for one in drawn].count("id0") == 2
    assert {one.task.id for one in drawn} == {"id0", "id2", "id5"}
    assert source.skipped in range(3, 7)
    [line] = [record.message for record in caplog.records]
    assert line.startswith("talk: a row is skipped, as are others like it: the chat template refuses ")
    assert "system, user, 'a': TemplateError: System" in line or "user, user, 'b': TemplateError: Conv" in line
    again.load_state_dict(source.state_dict())
    assert again.draw(3) == source.draw(3), "a resumed run draws on"
    assert not source.find("talk", "id1", 0).prompt_ids and source.find("talk", "id0", 0).prompt_ids


def test_an_environment_of_refused_prompts_alone_says_why(strict: Tokenizer) -> None:
    with pytest.raises(EnvironmentFault, match="no prompt of 'talk' fits in 100 tokens.*System role not supported"):
        _source(strict, SYSTEM, SYSTEM).draw(1)


def test_refused_demonstrations_are_skipped_and_counted(strict: Tokenizer, caplog) -> None:
    """The prompt of one is refused, and the reply in another, in which the user speaks twice."""
    twice, once = LaterTurn(tuple(DOUBLE), "no"), LaterTurn(tuple(FINE), "yes")
    rows = [(SYSTEM, ()), (FINE, (once,)), (FINE, (once, twice)), (FINE, ())]
    shown = [("talk", Demonstration(Task(str(n), prompt), "A", later)) for n, (prompt, later) in enumerate(rows)]
    source = DemonstrationSource(shown, strict, 500)
    with caplog.at_level(logging.INFO, logger="megatron_rl"):
        drawn = source.draw(4)
    assert [sample.sample_id for sample in drawn] == [1, 3, 5, 7]
    assert (source.skipped, source.state_dict()) == (4, {"demonstrations": 8})
    [line] = [record.message for record in caplog.records]
    assert line == f"talk: a row is skipped, as are others like it: {NOT_SUPPORTED}"
    with pytest.raises(EnvironmentFault, match="no demonstration fits in 500 tokens.*System role not supported"):
        DemonstrationSource(shown[:1], strict, 500).draw(1)


def test_refused_held_out_tasks_are_left_out(strict: Tokenizer, caplog) -> None:
    def access(*prompts: Prompt) -> EnvironmentAccess:
        tasks = [Task(f"id{number}", prompt) for number, prompt in enumerate(prompts)]
        client = SimpleNamespace(fetch_tasks=lambda name, split: tasks)
        return EnvironmentAccess([SimpleNamespace(name="talk", eval_prompts=None)], client, None)

    with caplog.at_level(logging.INFO, logger="megatron_rl"):
        found = access(SYSTEM, FINE, DOUBLE, FINE).held_out_tasks(2, strict, 100)
    assert [one.task.id for one in found] == ["id1", "id3"]
    assert [NOT_SUPPORTED in record.message for record in caplog.records] == [True]
    with pytest.raises(EnvironmentFault, match="no held-out task that fits in 100 tokens.*System role not supported"):
        access(SYSTEM).held_out_tasks(2, strict, 100)


def test_a_template_for_chats_that_begin_as_they_like(bytewise: Tokenizer) -> None:
    lenient = bytewise.formatting(ChatFormat(CHATML))
    assert all(lenient.encode_prompt(messages) for messages in (SYSTEM, DOUBLE, OPENING))
