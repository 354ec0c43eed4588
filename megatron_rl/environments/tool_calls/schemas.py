"""Tools as in OpenAI's API: whether their schemas are sound, and arguments are as they say.

Of JSON Schema this reads ``type``, ``enum``, ``const``, ``properties``, ``required``, ``additionalProperties`` (false),
``items``, ``anyOf`` and ``oneOf``; other keywords constrain nothing here. The package jsonschema would take 60 times as
long for the tools of a request, and follow patterns and references that a client sends (decision 021).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_rl.errors import shorten
from megatron_rl.json_text import check_bounds, dumps, loads

Tools = tuple[Mapping[str, Any], ...]
Schemas = Mapping[str, Mapping[str, Any]]
"""Name of a function -> JSON schema of its arguments."""
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MOST_TOOLS = 1_000
EMPTY: Mapping[str, Any] = {"type": "object", "properties": {}}
"""Of a function without parameters."""
KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (Mapping,),
    "null": (type(None),),
}


def checked_tools(value: object) -> Tools:
    """Return the tools if they can be shown to a model and called, else ``ValueError`` on the first bad one."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"tools are {shorten(value)}; give a list of them")
    if len(value) > MOST_TOOLS:
        raise ValueError(f"there are {len(value):,} tools; at most {MOST_TOOLS:,} are taken")
    check_bounds(list(value))
    names: set[str] = set()
    for index, tool in enumerate(value):
        try:
            name = _checked_name(tool)
        except ValueError as error:
            raise ValueError(f"tool {index} {error}") from None
        if name in names:
            raise ValueError(f"tool {index} has the name {name!r} of an earlier one; names must be unique")
        names.add(name)
    return tuple(value)


def _checked_name(tool: object) -> str:
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise ValueError(f'is {shorten(tool)}; write {{"type": "function", "function": {{"name": ...}}}}')
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"has the name {shorten(name)}; give 1 to 64 letters, digits, or one of _.-")
    try:
        dumps(tool)
    except (TypeError, ValueError) as error:
        raise ValueError(f"is no JSON: {error}") from None
    parameters = _parameters(function)
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise ValueError(f"({name}) has the parameters {shorten(parameters)}; give a JSON schema of type object")
    try:
        _check_schema(parameters)
    except ValueError as error:
        raise ValueError(f"({name}) has parameters that are no JSON schema: {error}") from None
    return name


def _check_schema(schema: object) -> None:
    """``ValueError`` for a keyword that `fault_of` could not read."""
    if not isinstance(schema, Mapping):
        raise ValueError(f"{shorten(schema)} is no object")
    kinds = schema.get("type", [])
    for kind in [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list | tuple) else [kinds]:
        if not isinstance(kind, str) or kind not in KINDS:
            raise ValueError(f"the type {shorten(kind)} is none of {', '.join(KINDS)}")
    shapes = {"properties": Mapping, "required": (list, tuple), "enum": (list, tuple), "anyOf": (list, tuple)}
    for key, kind in {**shapes, "oneOf": (list, tuple), "items": Mapping}.items():
        if key in schema and not isinstance(schema[key], kind):
            raise ValueError(f"its {key} is {shorten(schema[key])}")
    if not all(isinstance(name, str) for name in schema.get("required", ())):
        raise ValueError(f"its required is {shorten(schema['required'])}")
    inner = [*schema.get("properties", {}).values(), *schema.get("anyOf", ()), *schema.get("oneOf", ())]
    for each in [*inner, *([schema["items"]] if "items" in schema else [])]:
        _check_schema(each)


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """Return the schema of each function's arguments, by name; of tools that are checked."""
    functions = (tool["function"] for tool in tools)
    return {function["name"]: _parameters(function) for function in functions}


def _parameters(function: Mapping[str, Any]) -> Any:
    return EMPTY if function.get("parameters") is None else function["parameters"]


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a value may have; all of them where the schema says nothing."""
    kinds = schema.get("type")
    if kinds is not None:
        return {kinds} if isinstance(kinds, str) else set(kinds)
    choices = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if choices:
        return set().union(*map(types_of, choices))
    if "enum" in schema:
        return {kind for value in schema["enum"] for kind in KINDS if _is_a(value, kind)}
    return set(KINDS)


def value_of(text: str, schema: Mapping[str, Any]) -> Any:
    """Read an argument written without quotes: JSON where the schema allows what it says, else the text."""
    if types_of(schema) == {"string"}:
        return text
    try:
        value = loads(text)
    except ValueError:
        return text
    return text if fault_of(value, schema) and "string" in types_of(schema) else value


def fault_of(value: object, schema: Mapping[str, Any], where: str = "") -> str:
    """Say what is wrong with ``value``; "" where it is as the schema says."""
    return next(_faults(value, schema, where), "")


def _faults(value: object, schema: Mapping[str, Any], where: str) -> Iterator[str]:
    called, prefix = where or "the object of arguments", f"{where}." if where else ""
    if "type" in schema and not any(_is_a(value, kind) for kind in types_of(schema)):
        yield f"{called} is {shorten(value)}; it must be of type {' or '.join(sorted(types_of(schema)))}"
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if allowed is not None and not any(type(value) is type(one) and value == one for one in allowed):
        yield f"{called} is {shorten(value)}; it must be one of {shorten(list(allowed))}"
    faults = [fault_of(value, choice, where) for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ()))]
    if faults and all(faults):
        yield faults[0] if len(faults) == 1 else f"{called} is {shorten(value)}, none of what it may be: {faults[0]}"
    if isinstance(value, Mapping):
        properties = schema.get("properties", {})
        yield from (f"{prefix}{name} is missing" for name in schema.get("required", ()) if name not in value)
        if schema.get("additionalProperties") is False:
            known = ", ".join(properties) or "none"
            yield from (f"there is no {prefix}{shorten(n)}; known: {known}" for n in value if n not in properties)
        for name in (name for name in properties if name in value):
            yield from _faults(value[name], properties[name], prefix + name)
    elif isinstance(value, list | tuple) and "items" in schema:
        for index, item in enumerate(value):
            yield from _faults(item, schema["items"], f"{called}[{index}]")


def _is_a(value: object, kind: str) -> bool:
    """Of JSON: a truth value is no number."""
    return isinstance(value, KINDS[kind]) and (not isinstance(value, bool) or kind == "boolean")
