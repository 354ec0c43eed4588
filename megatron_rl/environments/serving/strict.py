"""Reads a request's body: strict JSON of bounded size, depth and number of values.

Python's parser holds the interpreter's lock from the first byte to the last: 16 MB of ``[[],[],..`` take it 1.3 s,
in which no other request is answered. So what is in the body is counted first, a megabyte at a time.
"""

from __future__ import annotations

import re
from typing import Any

from megatron_rl.environments.wire import check_bounds, loads

MAX_VALUES = 300_000
"""Commas, opening brackets and quotes of one body; 4096 samples with chat prompts have about 250,000."""

_CHUNK = 2**20
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse(body: bytes) -> Any:
    """The value of the body; ``ValueError`` for what is not JSON, or more than these bounds."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    if _more_than(MAX_VALUES, body):
        raise ValueError(f"more than {MAX_VALUES} commas, brackets and quotes")
    value = loads(text)
    # only an escape can bring a lone surrogate; most bodies have none, and their texts need no second look
    check_bounds(value, texts=_SURROGATE.search(body) is not None)
    return value


def _more_than(limit: int, body: bytes) -> bool:
    """Whether the text holds more values than ``limit``: commas, brackets and quotes outside of strings."""
    marks = (b",", b"[", b"{", b'"')
    if sum(map(body.count, marks)) <= limit:
        return False  # even if all of them are meant
    found, inside = 0, False
    start = 0
    while start < len(body):
        chunk = body[start : start + _CHUNK]
        # a backslash whose partner lies in the next chunk is left to that
        if (len(chunk) - len(chunk.rstrip(b"\\"))) % 2 and start + len(chunk) < len(body):
            chunk = chunk[:-1]
        start += len(chunk)
        plain = chunk.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in chunk else chunk
        quotes = plain.count(b'"')
        found += quotes
        if found > limit:
            return True
        outside = b"".join(plain.split(b'"')[inside::2])
        found += sum(map(outside.count, marks))
        inside ^= bool(quotes % 2)
        if found > limit:
            return True
    return False
