"""Schemas of tools: which are refused, and which arguments are wrong by them."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_rl.environments.tool_calls import checked_tools, parse
from megatron_rl.environments.tool_calls.schemas import fault_of, schemas_of


def tool(name: Any = "add", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def of(**parameters: Any) -> dict[str, Any]:
    return tool(parameters=parameters)


def test_sound_tools_stay_as_they_are() -> None:
    given = [
        tool(),
        tool("none", parameters=None),
        tool("sub.b-2", description="d", parameters={"properties": {"a": {"type": ["string", "null"]}}}),
        tool("any", parameters={"properties": {"a": {}, "b": {"anyOf": [{"type": "integer"}, {"enum": ["x"]}]}}}),
        {"function": {"name": "untyped", "parameters": {"type": "object", "$defs": {"x": 3}}}},
    ]
    assert checked_tools(given) == tuple(given)
    assert checked_tools([]) == ()
    assert list(schemas_of(given)) == ["add", "none", "sub.b-2", "any", "untyped"]


@pytest.mark.parametrize(
    ("tools", "complaint"),
    [
        ("add", "tools are 'add'; give a list"),
        (None, "tools are None"),
        ([3], 'tool 0 is 3; write {"type": "function", "function": {"name": ...}}'),
        ([{"type": "retrieval", "function": {"name": "a"}}], "tool 0 is {'function': {'name': 'a'}, 'type': 'retr"),
        ([{"type": "function"}], "tool 0 has the name None; give 1 to 64 letters, digits"),
        ([tool(), tool(3)], "tool 1 has the name 3"),
        ([tool("a b")], "tool 0 has the name 'a b'"),
        ([tool("a" * 65)], "tool 0 has the name"),
        ([tool(), tool("b"), tool()], "tool 2 has the name 'add' of an earlier one"),
        ([tool(parameters=[])], r"tool 0 \(add\) has the parameters \[\]; give"),
        ([tool(parameters=[3])], r"tool 0 \(add\) has the parameters \[3\]; give a JSON schema of type object"),
        ([of(type="string")], "has the parameters {'type': 'string'}; give a JSON schema of type object"),
        ([of(properties={"a": 3})], "has parameters that are no JSON schema: 3 is no object"),
        ([of(properties=["a"])], r"its properties is \['a'\]"),
        ([of(properties={"a": {"type": "int"}})], "the type 'int' is none of string, integer, number"),
        ([of(properties={"a": {"type": ["string", 3]}})], "the type 3 is none of"),
        ([of(properties={"a": {"items": {"enum": "abc"}}})], "its enum is 'abc'"),
        ([of(required="a")], "its required is 'a'"),
        ([of(required=[["a"]])], r"its required is \[\['a'\]\]"),
        ([of(anyOf=[3])], "3 is no object"),
        ([tool(description=float("nan"))], "tool 0 is no JSON: Out of range float values"),
        ([tool(description="\ud800")], "lone surrogate"),
        ([tool(str(number)) for number in range(1001)], "there are 1,001 tools; at most 1,000"),
    ],
)
def test_unsound_tools_are_refused_in_one_line(tools: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as refused:
        checked_tools(tools)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "integer"}, [0, -3], [1.0, True, "1", None, [1]]),
        ({"type": "number"}, [0, 1.5], [False, "1"]),
        ({"type": "boolean"}, [True], [1, "true"]),
        ({"type": ["string", "null"]}, ["", None], [0]),
        ({"type": "array", "items": {"type": "string"}}, [[], ["a"]], [["a", 1], "a"]),
        ({"enum": ["a", 1, None]}, ["a", 1, None], ["b", True, 1.0]),
        ({"const": "a"}, ["a"], ["b"]),
        ({"anyOf": [{"type": "integer"}, {"type": "string", "enum": ["all"]}]}, [3, "all"], ["some", 1.5]),
        ({"oneOf": [{"type": "integer"}]}, [3], ["some"]),
        ({"properties": {"b": {"type": "integer"}}, "required": ["b"]}, [{"b": 1}, {"b": 1, "c": 2}], [{}]),
        ({"properties": {"b": {"type": "integer"}}, "additionalProperties": False}, [{"b": 1}, {}], [{"c": 1}]),
        ({}, [1, "a", None, {"a": [1]}], []),
    ],
)
def test_arguments_are_held_to_their_schema(schema: dict, right: list, wrong: list) -> None:
    outer = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    assert [fault_of({"a": value}, outer) for value in right] == [""] * len(right)
    faults = [fault_of({"a": value}, outer) for value in wrong]
    assert all("a" in fault.split()[0] or "no a." in fault for fault in faults), faults


def test_a_fault_names_where_it_is() -> None:
    days = {"type": "array", "items": {"type": "integer"}}
    inner = {"type": "object", "properties": {"days": days}, "required": ["x"]}
    outer = {"properties": {"when": inner, "kind": {"enum": ["a", "b"]}}, "additionalProperties": False}
    outer["type"] = "object"
    assert fault_of({"when": {}}, outer) == "when.x is missing"
    assert fault_of({"when": {"x": 1, "days": [1, "2"]}}, outer) == "when.days[1] is '2'; it must be of type integer"
    assert fault_of({"kind": "c"}, outer) == "kind is 'c'; it must be one of ['a', 'b']"
    assert fault_of({"knd": "a"}, outer) == "there is no 'knd'; known: when, kind"
    assert fault_of([], outer) == "the object of arguments is []; it must be of type object"


def test_nested_choices_take_no_exponential_time() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(25):
        schema = {"anyOf": [schema]}
    [listed] = checked_tools([of(properties={"a": schema})])
    [call] = parse('<tool_call>{"name": "add", "arguments": {"a": "x"}}</tool_call>', [listed]).calls
    assert call.problem == "a is 'x'; it must be of type integer"
