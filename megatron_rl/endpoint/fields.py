"""Fields of a request's JSON object, read one by one: each refusal names its field as OpenAI's errors do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from megatron_rl.errors import one_line, shorten
from megatron_rl.json_text import MAX_VALUES, check_bounds, loads

T = TypeVar("T")
LARGEST = 2**31 - 1
"""Largest number of a field without a bound of its own."""

_WORDS = {
    str: "a text", int: "a whole number", float: "a number", bool: "true or false", list: "a list", dict: "an object",
}  # fmt: skip


class ApiError(Exception):
    """An error that the client gets as OpenAI words it: ``{"error": {"message", "type", "param", "code"}}``."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refuse(param: str, why: str, code: str = "invalid_value") -> NoReturn:
    """Raise 400 for ``param``: ``'n' is 0; ...``."""
    raise ApiError(400, code, f"{param!r} {why}", param)


def typed(value: Any, kind: type[T], param: str) -> T:
    """Return ``value`` if it is a ``kind``, else refuse ``param``; a whole number is a float, true is no number."""
    if kind is float and type(value) is int and abs(value) < 2**53:
        value = float(value)
    if type(value) is not kind:
        refuse(param, f"is {shorten(value)}; give {_WORDS[kind]}", "invalid_type")
    return value


def token_ids(values: list[Any], vocab_size: int, param: str) -> tuple[int, ...]:
    """Return ``values`` if they are ids of the vocabulary, else refuse ``param``."""
    for item in values:
        if type(item) is not int or not 0 <= item < vocab_size:
            refuse(param, f"has {shorten(item)}; give token ids from 0 to {vocab_size - 1}")
    return tuple(values)


def parsed(data: bytes, read: Callable[[Any], T]) -> T:
    """Return what ``read`` makes of the JSON in a body.

    Raises:
        ApiError: it is no JSON, too large, or ``read`` refuses it.
    """
    # No other client is served while JSON is read, and ten million empty lists take seconds.
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise ApiError(413, "too_large", f"the body has more than {MAX_VALUES:,} commas and brackets; send less")
    try:
        body = loads(data)
        check_bounds(body)
    except ValueError as error:
        raise ApiError(400, "invalid_json", f"the body is not JSON: {one_line(str(error), 200)}") from error
    return read(body)


class Fields:
    """The fields of one object; null counts as absent. A field that is not as asked for is an `ApiError`."""

    def __init__(self, body: Mapping[str, Any], path: str = "") -> None:
        """``path`` stands before a field's name in messages: ``messages[0].``."""
        self._body, self._path = body, path
        self.unread = {name for name, value in body.items() if value is not None}
        """Names that nobody has asked for."""

    def take(self, name: str) -> Any:
        """Return the value, of any type; None where there is none."""
        self.unread.discard(name)
        return self._body.get(name)

    def get(self, name: str, kind: type[T]) -> T | None:
        """Return the value if it is there."""
        value = self.take(name)
        return None if value is None else typed(value, kind, self._path + name)

    def required(self, name: str, kind: type[T]) -> T:
        """Return the value, which must be there."""
        value = self.get(name, kind)
        if value is None:
            refuse(self._path + name, f"is missing; give {_WORDS[kind]}", "missing_required_parameter")
        return value

    def number(self, name: str, kind: type[T], low: float, high: float = LARGEST) -> T | None:
        """Return a number from ``low`` to ``high``, both included, if it is there."""
        value = self.get(name, kind)
        if value is not None and not low <= value <= high:
            refuse(self._path + name, f"is {shorten(value)}; give a number from {low} to {high}")
        return value
