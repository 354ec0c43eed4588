"""Files that a user names. Messages are words to follow the name: ``cannot be read (No such file or directory)``.

A FIFO would be waited for and a device read until memory is full. `Path.is_file` and `Path.resolve` raise for names
that are too long and for links that lead to themselves, where `os.path` has an answer.
"""

from __future__ import annotations

import argparse
import os
import stat
import unicodedata
from pathlib import Path
from typing import Any, BinaryIO

from megatron_rl.errors import shorten
from megatron_rl.json_text import parse_json

_LONGEST_NAME, _LONGEST_PATH = 255, 3072
"""Bytes of one name, and of a whole path that leaves room for the names of files below it; Linux takes 4096."""


def path_refusal(path: str) -> str | None:
    """Say why ``path`` cannot name a file or directory, which need not exist; None if it can."""
    if not path.strip():
        return "is empty; name a path, or leave it out"
    # Cs: bytes that are not UTF-8 arrive as halves of surrogate pairs.
    if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in path):
        return f"has a line break, another control character or a broken one, got {shorten(path)}; use another name"
    if path.startswith("-"):
        return f"begins with a dash, as a flag does, got {shorten(path)}; for a path of that name write ./{path[:40]}"
    longest = max(len(name.encode()) for name in path.split("/"))
    if longest > _LONGEST_NAME or len(path.encode()) > _LONGEST_PATH:
        limits = f"names of {_LONGEST_NAME} bytes and here {_LONGEST_PATH} altogether"
        return f"is too long for a file system, which takes {limits}, got {shorten(path)}; use a shorter one"
    return None


def is_entry(text: str) -> bool:
    """Return whether ``text`` is a YAML mapping in braces, given where the path of a file may be."""
    return text.startswith("{") and text.endswith("}")


def named_path(text: str) -> Path:
    """Check a path for argparse."""
    if refusal := path_refusal(text):
        raise argparse.ArgumentTypeError(refusal)
    return Path(text)


def open_file(path: str | Path) -> BinaryIO:
    """Open a regular file; ``ValueError`` says why it cannot be read."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            return open(path, "rb")
    except (OSError, ValueError) as error:  # the latter for a null byte
        raise ValueError(f"cannot be read ({getattr(error, 'strerror', error)})") from error
    raise ValueError("cannot be read (it is a device or a pipe, not a file)")


def read_text(path: str | Path, most: int = 2**26) -> str:
    """Read text of at most ``most`` bytes, without a byte order mark; ``ValueError`` says what is wrong with it."""
    try:
        with open_file(path) as file:
            data = file.read(most + 1)
    except OSError as error:  # a damaged disk, a lost network
        raise ValueError(f"cannot be read ({error.strerror})") from error
    if len(data) > most:
        raise ValueError(f"has more than {most / 2**20:g} MiB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text ({error.reason} at byte {error.start})") from None


def read_json(path: str | Path) -> Any:
    """Read a JSON file; ``ValueError`` as of `read_text`, or that it is not JSON."""
    text = read_text(path)
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"is not JSON ({error})") from error
