"""Calls of tools as grammars in Lark's notation, with which an answer can be made to be a call."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_rl.json_text import dumps

Literal = Callable[[str], str]
"""A text as the grammar writes it; a special token is not written as its text is."""


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return what matches the JSON values of a schema, spaced as Python's ``json.dumps`` does.

    White space of any length would let a model that knows no way on fill its answer with it.
    """
    spaces = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return "%json " + dumps({**schema, "x-guidance": spaces})


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of arguments without others than it names, unless it says that there may be some."""
    return {"type": "object", "properties": {}, "additionalProperties": False, **schema}


def written(text: str, markers: Sequence[str], literal: Literal) -> str:
    """Return ``text``, in which ``markers`` may be special tokens, as a sequence of literals."""
    parts = re.split("|".join(f"({re.escape(marker)})" for marker in markers), text) if markers else [text]
    return " ".join(literal(part) for part in parts if part)
