"""Tools of a step environment: schemas from methods, calls made or answered with an error, counts."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from megatron_rl.environments import loading
from megatron_rl.environments.base import Environment
from megatron_rl.environments.client import EnvironmentClient
from megatron_rl.environments.loader import find_environment
from megatron_rl.environments.process import EnvironmentServerProcess
from megatron_rl.environments.results import judge
from megatron_rl.environments.selftest import run_checks
from megatron_rl.environments.tools import ToolEnvironment, tool
from megatron_rl.environments.wire import item_from_json, item_to_json
from megatron_rl.errors import ConfigError, EnvironmentFault
from megatron_rl.json_text import dumps, loads
from megatron_rl.registry import PARSERS
from megatron_rl.types import Grade, Step, Task, Turn


class Shop(ToolEnvironment):
    """Sells pears."""

    name = "shop_of_pears"
    max_turns = 4
    in_process = True
    longest_result = 40

    def tasks(self, split: str):
        yield Task(split, ({"role": "user", "content": "Two pears?"},), {"price": 3, "answer": "6"})

    @tool
    def price(self, product: str, task: Task, kind: Literal["net", "gross"] = "net") -> int:
        """What a product costs.

        In cents.

        Args:
            product: its name,
                as in the question
            kind (str): with tax or without

        Returns:
            cents: a number
        """
        return {"pear": task.data["price"]}[product]

    @tool
    def total(self, prices: list[int], factor: float | None = None) -> dict[str, Any]:
        return {"total": sum(prices) * (factor or 1)}

    @tool
    def down(self) -> None:
        raise EnvironmentFault("the shop's server is gone")

    @tool
    def long(self) -> str:
        return "x" * 100

    def grade(self, task: Task, transcript) -> float | Grade:
        right = transcript.ended and transcript.text.strip() == task.data["answer"]
        return Grade(float(right), {"length": len(transcript.text)}, "correct" if right else "wrong")

    def gold_turns(self, task: Task) -> list[str]:
        return [self.call("price", product="pear"), self.call("total", prices=[3, 3]), "6"]


SHOP = Shop()
[TASK] = SHOP.tasks("train")
TEXT_TASK = dataclasses.replace(TASK, prompt="Two pears?")
HERMES = PARSERS.get("hermes")
NONE = {"tool_calls": 0, "bad_tool_calls": 0}


def say(text: str, state: Any = None, task: Task = TASK, **turn: Any) -> Step:
    asked = {"finish_reason": "stop", "num_tokens": len(text), "number": 1, "last": False, **turn}
    return SHOP.step(task, state, Turn(text, **asked))


def answers(*calls: tuple[str, dict], **turn: Any) -> list[str]:
    return [message["content"] for message in say(HERMES.write(calls), **turn).messages]


def test_schemas_come_from_hints_and_docstrings() -> None:
    price, total, down, _ = (each["function"] for each in SHOP.tools)
    assert price == {
        "name": "price",
        "description": "What a product costs.\n\nIn cents.",
        "parameters": {
            "type": "object",
            "properties": {
                "product": {"type": "string", "description": "its name, as in the question"},
                "kind": {"enum": ["net", "gross"], "description": "with tax or without"},
            },
            "required": ["product"],
            "additionalProperties": False,
        },
    }
    assert total["parameters"]["properties"] == {
        "prices": {"type": "array", "items": {"type": "integer"}},
        "factor": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    }
    assert "description" not in total and down["parameters"]["properties"] == {}
    assert loads(dumps(list(SHOP.tools))) == list(SHOP.tools)
    assert SHOP.price("pear", TASK) == 3, "it is still a method"


def test_what_cannot_be_a_tool_fails_where_it_is_written() -> None:
    class Odd:
        pass

    def untyped(self, a): ...
    def many(self, *a: int): ...
    def odd(self, a: Odd): ...
    def nested(self, a: list[set[int]]): ...

    odd.__annotations__ = {"a": Odd}
    for function in (untyped, many, odd, nested):
        with pytest.raises(TypeError, match=f"tool {function.__name__}: "):
            tool(function)
    with pytest.raises(ValueError, match="has the name"):
        renamed = tool(lambda self: 1)
        type("Bad", (ToolEnvironment,), {"x": renamed})


def test_tools_are_inherited_and_replaced() -> None:
    class More(Shop):
        @tool
        def down(self, why: str) -> str:
            return why

        @tool
        def up(self) -> str:
            return "up"

    assert [each["function"]["name"] for each in More.tools] == ["price", "total", "down", "long", "up"]
    assert More.tools[2]["function"]["parameters"]["required"] == ["why"]
    assert [each["function"]["name"] for each in Shop.tools] == ["price", "total", "down", "long"]
    assert Environment.tools == ()


def test_calls_are_made_in_order_and_answered_by_their_ids() -> None:
    step = say("Let me see. " + HERMES.write([("price", {"product": "pear"}), ("total", {"prices": [1, 2]})]))
    assert step.messages == (
        {"role": "tool", "tool_call_id": "call_1_0", "content": "3", "name": "price"},
        {"role": "tool", "tool_call_id": "call_1_1", "content": '{"total": 3}', "name": "total"},
    )
    counts = {"tool_calls": 2, "bad_tool_calls": 0}
    assert (step.state, step.done, step.reward) == (counts, False, Grade(0.0, counts, "no_answer"))


def test_bad_calls_are_answered_with_an_error_and_counted() -> None:
    bad = [
        ("sum", {}),
        ("price", {}),
        ("price", {"product": "fig"}),
        ("price", {"product": "pear", "task": {}}),
        ("total", {"prices": ["a"]}),
        ("price", {"product": "pear", "kind": "both"}),
    ]
    step = say(HERMES.write(bad) + "<tool_call>{</tool_call>" + HERMES.write([("price", {"product": "pear"})]))
    told = [message["content"] for message in step.messages]
    assert told == [
        "Error: there is no function 'sum': nothing is called like it. Available: price, total, down, long",
        "Error: product is missing",
        "Error: KeyError: 'fig'",
        "Error: there is no 'task'; known: product, kind",
        "Error: prices[0] is 'a'; it must be of type integer",
        "Error: kind is 'both'; it must be one of ['net', 'gross']",
        "3",
        told[-1],
    ]
    assert told[-1].startswith("Error: a call cannot be read: Expecting property name")
    assert len({message["tool_call_id"] for message in step.messages}) == 8
    assert step.state == {"tool_calls": 8, "bad_tool_calls": 7}
    assert say(HERMES.write(bad[:1]), step.state).state == {"tool_calls": 9, "bad_tool_calls": 8}


def test_a_tool_that_is_out_of_order_leaves_the_sample_out() -> None:
    result = judge(SHOP, (TASK, None, Turn(SHOP.call("down"), "stop", 3)))
    assert (result.reward, result.code) == (None, "environment_exception")
    assert "the shop's server is gone" in result.message


def test_long_results_and_many_calls_are_cut() -> None:
    assert answers(("long", {})) == ["x" * 40 + " ... (cut)"]
    told = answers(*[("price", {"product": "pear"})] * 40)
    assert told == ["3"] * 32 + ["Error: more than 32 calls at once; the others were not made"]


def test_the_end_is_graded_with_the_counts_of_the_conversation() -> None:
    counts = {"tool_calls": 3, "bad_tool_calls": 1}
    assert say("6", counts) == Step(done=True, reward=Grade(1.0, {**counts, "length": 1}, "correct"))
    assert say("7").reward == Grade(0.0, {**NONE, "length": 1}, "wrong")
    call = SHOP.call("price", product="pear")
    assert say(call, last=True).reward == Grade(0.0, {**NONE, "length": len(call)}, "wrong"), "nobody reads the result"
    assert say(call + "<tool_call>{", finish_reason="length").done, "a turn that was cut ends it"


def test_the_form_of_calls_is_that_of_the_turn() -> None:
    glm = PARSERS.get("glm").write([("price", {"product": "pear"})])
    assert say(glm, tool_call_parser="glm").messages[0]["content"] == "3"
    assert say(glm).messages[0]["content"].startswith("Error: a call cannot be read"), "Hermes without a template"
    _, _, turn = item_from_json(loads(dumps(item_to_json((TASK, None, Turn(glm, "stop", 3, 0, False, "glm"))))))
    assert turn.tool_call_parser == "glm"


def test_results_after_plain_text_are_text() -> None:
    call = SHOP.call("price", product="pear")
    assert say(call, task=TEXT_TASK).messages[0]["content"] == "\n<tool_response>\n3\n</tool_response>\n"


def test_its_own_checks_pass() -> None:
    assert [check for check in run_checks(SHOP) if check.passed is False] == []


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with the example of the docs as ``prices.py``."""
    page = (Path(__file__).parents[3] / "docs" / "environments.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```python\n# environments/prices/__init__.py\n(.*?)```", page, re.DOTALL)
    (tmp_path / "prices.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_the_example_of_the_docs(here: Path) -> None:
    prices = find_environment("prices.py:Prices").from_options({})
    assert [check for check in run_checks(prices) if check.passed is False] == []
    [schema] = prices.tools
    assert schema["function"]["description"] == "The price of a product in cents."
    assert list(schema["function"]["parameters"]["properties"]) == ["product"]


def test_over_rest_with_tools_made_in_workers(here: Path) -> None:
    (here / "list.yaml").write_text("- {environment: 'prices.py:Prices', system_prompt: Be short.}\n")
    with EnvironmentServerProcess(here / "list.yaml", here) as server:
        client = EnvironmentClient(server.address_file)
        [served] = client.environments()
        task = client.fetch_tasks("prices", "train")[0]
        glm = PARSERS.get("glm").write([("price", {"product": "pear"})])
        [going_on] = asyncio.run(client.grade("prices", [(task, None, Turn(glm, "stop", 9, 0, False, "glm"))]))
    assert served.chat.system_prompt == "Be short."
    assert list(served.chat.tools) == list(find_environment("prices.py:Prices").tools)
    assert going_on.continuation.messages[0]["content"] == "37"
    assert going_on.metrics == {"tool_calls": 1.0, "bad_tool_calls": 0.0}
    [surveyed] = loading.survey_list(here / "list.yaml")
    assert surveyed.chat == served.chat


@pytest.mark.parametrize(
    ("tools", "complaint"),
    [("[3]", "tool 0 is 3; write"), ("3", "tools are 3; give a list"), ("[{}]", "tool 0 has the name None")],
)
def test_schemas_that_an_author_wrote_are_checked_before_a_run(here: Path, tools: str, complaint: str) -> None:
    (here / "odd.py").write_text(
        "from megatron_rl.environments.base import Environment\n"
        "from megatron_rl.types import Task\n"
        f"class Odd(Environment):\n    name = 'odd'\n    tools = {tools}\n"
        "    def tasks(self, split):\n        yield Task(split, 'a')\n"
        "    def grade(self, task, transcript):\n        return 0.0\n"
    )
    (here / "list.yaml").write_text("- environment: odd.py:Odd\n")
    with pytest.raises(ConfigError) as refused:
        loading.survey_list(here / "list.yaml")
    [line] = refused.value.lines
    assert line.startswith(f"odd: its tools cannot be shown to a model: {complaint}")
