"""The key ``mcp`` of an entry: a tool server, which a command starts or which runs at a URL of the loopback."""

from __future__ import annotations

import ipaddress
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from megatron_rl.environments.base import suggestion
from megatron_rl.errors import shorten

LISTS = ("command", "variables")
LONGEST_DEADLINE = 600.0


@dataclass(frozen=True)
class ServerSettings:
    """One of ``command`` and ``url`` is given."""

    command: tuple[str, ...] = ()
    url: str = ""
    variables: tuple[str, ...] = ()
    """Environment variables that the command gets besides PATH, HOME and LANG."""
    deadline: float = 10.0
    """Seconds that the calls of one turn may take together."""

    @classmethod
    def of_entry(cls, entry: Mapping[str, Any], problems: list[str]) -> Self | None:
        """Read the key, where there is one; what is wrong with it is added to ``problems``."""
        found = [f"mcp {problem}" for problem in _problems(entry["mcp"])] if "mcp" in entry else []
        problems += found
        if found or "mcp" not in entry:
            return None
        return cls(**{key: tuple(value) if key in LISTS else value for key, value in entry["mcp"].items()})

    def for_workers(self) -> dict[str, Any]:
        """Return what a connection needs, as JSON; it has the values of the variables and is for no log."""
        names = ("PATH", "HOME", "LANG", *self.variables)
        return asdict(self) | {"environment": {name: os.environ[name] for name in names if name in os.environ}}


def _problems(value: object) -> Iterator[str]:
    """What is wrong with the key, and what to write instead."""
    known = ServerSettings.__dataclass_fields__
    if not isinstance(value, Mapping) or ("command" in value) == ("url" in value):
        yield f"is {shorten(value)}; write {{command: [python, server.py]}} or {{url: http://127.0.0.1:PORT/PATH}}"
        return
    yield from (f"has the unknown key {shorten(key)}{suggestion(key, known)}" for key in value if key not in known)
    for key in (key for key in LISTS if key in value):
        if not isinstance(value[key], list) or not value[key] or not all(isinstance(word, str) for word in value[key]):
            yield f"has the {key} {shorten(value[key])}; give a list of words, such as [a, b]"
        elif key == "command" and shutil.which(value[key][0]) is None:
            yield f"has the command {shorten(value[key][0])}, which is not found; install it, or give its path"
        elif key == "variables" and (absent := [name for name in value[key] if name not in os.environ]):
            yield f"names the variable {shorten(absent[0])}, which is not set; export it"
    deadline = value.get("deadline", 1)
    if type(deadline) not in (int, float) or not 0 < deadline <= LONGEST_DEADLINE:
        yield f"has the deadline {shorten(deadline)}; give seconds, above 0 and up to {LONGEST_DEADLINE:g}"
    if "url" in value and not _is_loopback(value["url"]):
        yield f"has the url {shorten(value['url'])}; give one of this machine, http://127.0.0.1:PORT/PATH"


def _is_loopback(url: object) -> bool:
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        is_plain = parts.scheme == "http" and "@" not in parts.netloc and parts.port != 0
        return is_plain and (parts.hostname == "localhost" or ipaddress.ip_address(parts.hostname or "").is_loopback)
    except ValueError:
        return False
