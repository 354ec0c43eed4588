"""Tools for environments of several turns: methods that the model calls, and what it reads of their results.

    class Prices(ToolEnvironment):
        name = "prices"

        @tool
        def price(self, product: str, task: Task) -> int:
            '''The price of a product in cents.

            Args:
                product: its name, as in the question.
            '''
            return task.data["prices"][product]

        def grade(self, task, transcript):
            return float(transcript.text.strip() == task.data["answer"])
"""

from __future__ import annotations

import inspect
import re
import types
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

from megatron_rl.environments.base import ConversationEnvironment
from megatron_rl.environments.tool_calls import DEFAULT, ToolCall, checked_tools, parse
from megatron_rl.errors import EnvironmentFault, one_line
from megatron_rl.json_text import dumps
from megatron_rl.registry import PARSERS
from megatron_rl.types import Grade, Step, Task, Transcript, Turn

SIMPLE: Mapping[Any, str] = {
    str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object", type(None): "null",
}  # fmt: skip
LONGEST_ERROR = 500


class CallFailed(Exception):
    """A tool raises it to have a call answered with an error of its own words."""


class tool:
    """Makes a method a tool: its type hints and docstring are the schema. A parameter of the type `Task` gets the task
    and is not the model's to give.

    Raises:
        TypeError: a parameter has no type, or one that JSON does not have.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        hints = get_type_hints(function)
        parameters = list(inspect.signature(function).parameters.values())[1:]
        self._task = next((p.name for p in parameters if hints.get(p.name) is Task), None)
        description, told = _docstring(function)
        properties, required = {}, []
        for each in parameters:
            if each.name == self._task:
                continue
            if each.name not in hints or each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
                raise TypeError(f"tool {function.__name__}: parameter {each} needs a name and a type")
            about = {"description": told[each.name]} if each.name in told else {}
            properties[each.name] = {**_schema(hints[each.name], f"{function.__name__}: {each.name}"), **about}
            required += [each.name] if each.default is each.empty else []
        schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        about = {"description": description} if description else {}
        self.schema: Mapping[str, Any] = {
            "type": "function",
            "function": {"name": function.__name__, **about, "parameters": schema},
        }

    def __get__(self, environment: ToolEnvironment | None, owner: type) -> Self | types.MethodType:
        """The method of an instance, as without the decorator."""
        return self if environment is None else types.MethodType(self._function, environment)

    def run(self, environment: ToolEnvironment, task: Task, arguments: Mapping[str, Any]) -> str:
        """Return the result as text; raises what the author's code raises."""
        given = {**arguments, self._task: task} if self._task else arguments
        result = self._function(environment, **given)
        return result if isinstance(result, str) else dumps(result)


class ToolEnvironment(ConversationEnvironment):
    """The model calls the methods marked with ``@tool``, reads what they return, and answers when it calls none.

    Only a call that can be read, of a function there is, with arguments of its schema, is made; any other, and one that
    raises, is answered with the error. ``EnvironmentFault`` leaves the sample out instead. The metrics ``tool_calls``
    and ``bad_tool_calls`` count the calls of a conversation, and those answered with an error.
    """

    parser: ClassVar[str] = DEFAULT
    """The form of calls in demonstrations and after prompts that are plain text; a chat's follows its template."""
    text_result: ClassVar[str] = "\n<tool_response>\n{}\n</tool_response>\n"
    """How a result follows where the prompt is plain text."""
    longest_result: int = 10_000
    """Characters of a result; what is longer is cut."""
    most_calls: int = 32
    """Calls of one turn that are made."""
    _tools: Mapping[str, tool] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = {name: member for name, member in vars(cls).items() if isinstance(member, tool)}
        cls._tools = {**cls._tools, **own}
        cls.tools = checked_tools([each.schema for each in cls._tools.values()])

    @abstractmethod
    def grade(self, task: Task, transcript: Transcript) -> float | Grade:
        """Return the reward of the last turn: one that calls nothing, that was cut, or that is the last possible."""

    def step(self, task: Task, state: Any, turn: Turn) -> Step:
        """Return the results of the turn's calls, or the end."""
        counts = dict(state or {"tool_calls": 0, "bad_tool_calls": 0})
        parser, prefix = turn.tool_call_parser or self.parser, f"call_{turn.number}"
        said = parse(turn.text, self.tools, parser, prefix)
        if turn.last or not turn.ended or not (said.calls or said.problems):
            verdict = self.grade(task, turn)
            grade = verdict if isinstance(verdict, Grade) else Grade(verdict)
            return Step(done=True, reward=replace(grade, metrics={**counts, **grade.metrics}))
        results = [(call.id, call.name, *self._result(task, call)) for call in said.calls[: self.most_calls]]
        errors = list(said.problems)
        if len(said.calls) > self.most_calls:
            errors.append(f"more than {self.most_calls} calls at once; the others were not made")
        new_id, known = PARSERS.get(parser).new_id, len(results)
        results += [(new_id(prefix, known + n), "", f"Error: {error}", True) for n, error in enumerate(errors)]
        counts["tool_calls"] += len(said.calls) + len(said.problems)
        counts["bad_tool_calls"] += sum(is_bad for *_, is_bad in results)
        shown = self.text_result if isinstance(task.prompt, str) else "{}"
        messages = [
            {"role": "tool", "tool_call_id": number, "content": shown.format(text)} | ({"name": name} if name else {})
            for number, name, text, _ in results
        ]
        return Step(tuple(messages), counts, reward=Grade(self.reward_range[0], counts, "no_answer"))

    def call(self, name: str, **arguments: Any) -> str:
        """Return a call as the model writes it, for demonstrations and ``gold_turns``."""
        return PARSERS.get(self.parser).write([(name, arguments)])

    def _result(self, task: Task, call: ToolCall) -> tuple[str, bool]:
        """What the model reads, and whether that is an error."""
        if call.problem:
            return f"Error: {call.problem}", True
        is_bad = False
        try:
            text = self._tools[call.name].run(self, task, call.arguments)
        except (EnvironmentFault, MemoryError):  # not the model's fault
            raise
        except CallFailed as failure:
            text, is_bad = f"Error: {failure}", True
        except Exception as error:  # noqa: BLE001 - an author's code may raise anything
            return f"Error: {one_line(f'{type(error).__name__}: {error}', LONGEST_ERROR)}", True
        return text if len(text) <= self.longest_result else f"{text[: self.longest_result]} ... (cut)", is_bad


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """What it says before its sections, and of each parameter below ``Args:``."""
    description, _, rest = (inspect.getdoc(function) or "").partition("\nArgs:\n")
    arguments = re.split(r"\n(?=\S)", rest)[0] if rest.startswith((" ", "\t")) else ""
    found = re.findall(r"^ {1,4}(\w+)(?: \([^)]*\))?: *(.*(?:\n {5,}.*)*)", arguments, re.MULTILINE)
    return re.split(r"\n\w+:\n", description)[0].strip(), {name: " ".join(text.split()) for name, text in found}


def _schema(hint: Any, where: str) -> dict[str, Any]:
    """The JSON schema of a type hint."""
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if hint is Any:
        return {}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(each, where) for each in inner]}
    if origin not in SIMPLE:
        raise TypeError(f"tool {where} has the type {hint}; use str, int, float, bool, list, dict, Literal or None")
    items = {"items": _schema(inner[0], where)} if origin is list and inner else {}
    return {"type": SIMPLE[origin], **items}
