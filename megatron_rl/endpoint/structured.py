"""What an answer has to look like, as a grammar in Lark's notation that `inference.guides` compiles.

    response_format {"type": "json_schema", "json_schema": {"schema": S}}    start: %json S
    guided_regex "[0-9]+"                                                    start: /[0-9]+/
    guided_choice ["yes", "no"]                                              start: "yes" | "no"
    tool_choice "required"                                                   start: calls, in the model's own form

An answer that could be a call of a tool as well may be either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.endpoint.fields import Fields, refuse, typed
from megatron_rl.environments.tool_calls.grammar import json_rule
from megatron_rl.errors import shorten
from megatron_rl.json_text import loads

MAX_CHOICES_OF_TEXT, MAX_REGEX = 1024, 16_384
Rule = Callable[[Any, str], str]
"""A field's value and its name -> the right side of a rule."""


@dataclass(frozen=True)
class Shape:
    """The shape of an answer."""

    param: str
    """The field that asks for it."""
    rule: str
    """The right side of a rule in Lark's notation."""


def read_shape(fields: Fields) -> Shape | None:
    """Return the shape that the fields of a request ask for; None: any text. Two at once are an `ApiError`."""
    shapes = [Shape(f"guided_{name}", rule) for name, rule in _rules(fields, "guided_")]
    inner = fields.get("structured_outputs", dict)
    if inner is not None:
        own = Fields(inner, "structured_outputs.")
        shapes += [Shape(f"structured_outputs.{name}", rule) for name, rule in _rules(own, "")]
        if own.get("json_object", bool):
            shapes.append(Shape("structured_outputs.json_object", json_rule({"type": "object"})))
        for name in sorted(own.unread):
            refuse(f"structured_outputs.{name}", "is not supported; give json, json_object, regex or choice")
    format = fields.get("response_format", dict)
    if format is not None:
        schema = _schema_of_format(Fields(format, "response_format."))
        shapes += [] if schema is None else [Shape("response_format", json_rule(schema))]
    if len(shapes) > 1:
        refuse(shapes[1].param, f"stands beside {shapes[0].param!r}; give one of them")
    return shapes[0] if shapes else None


def _rules(fields: Fields, prefix: str) -> list[tuple[str, str]]:
    found = []
    for name, rule in (("json", _json), ("regex", _regex), ("choice", _choice)):
        value = fields.take(prefix + name)
        if value is not None:
            found.append((name, rule(value, prefix + name)))
    return found


def _schema_of_format(format: Fields) -> Mapping[str, Any] | None:
    kind = format.required("type", str)
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        refuse("response_format.type", f"is {shorten(kind)}; give text, json_object or json_schema")
    return Fields(format.required("json_schema", dict), "response_format.json_schema.").required("schema", dict)


def _json(value: Any, param: str) -> str:
    if isinstance(value, str):
        try:
            value = loads(value)
        except ValueError:
            refuse(param, "is no JSON; give a JSON schema")
    return json_rule(typed(value, dict, param))


def _regex(value: Any, param: str) -> str:
    text = typed(value, str, param)
    if not 0 < len(text) <= MAX_REGEX:
        refuse(param, f"has {len(text):,} characters; give a regular expression of 1 to {MAX_REGEX:,}")
    # A slash ends the expression in Lark's notation, unless it is escaped.
    escaped = re.sub(r"(?s)(\\.)|/", lambda found: found[1] or r"\/", text).replace("\n", r"\n")
    return f"/{escaped}/"


def _choice(value: Any, param: str) -> str:
    texts = typed(value, list, param)
    if not 0 < len(texts) <= MAX_CHOICES_OF_TEXT:
        refuse(param, f"has {len(texts)} texts; give 1 to {MAX_CHOICES_OF_TEXT}")
    for index, text in enumerate(texts):
        if not typed(text, str, f"{param}[{index}]"):
            refuse(f"{param}[{index}]", "is empty; give a text")
    return " | ".join(map(json.dumps, texts))
