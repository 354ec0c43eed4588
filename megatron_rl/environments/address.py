"""Where the environment server listens: a small private file that the server writes and clients read."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_rl.environments.wire import WireError, dumps, loads, read_key
from megatron_rl.errors import EnvironmentFault


@dataclass(frozen=True)
class Address:
    """Everything a client needs; who holds the token may use the server."""

    url: str
    token: str
    pid: int

    @property
    def headers(self) -> dict[str, str]:
        """The request headers that carry the token."""
        return {"Authorization": f"Bearer {self.token}"}


def write_address(path: Path, address: Address) -> None:
    """Writes the file in one step, readable by its owner alone: a reader sees all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{address.pid}")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(dumps(asdict(address)))
    os.replace(partial, path)


def read_address(path: Path) -> Address:
    """The address in the file; ``EnvironmentFault`` when there is none (yet)."""
    try:
        value = loads(path.read_text(encoding="utf-8"))
        return Address(*(read_key(value, key, kind, "") for key, kind in _FIELDS.items()))
    except OSError as error:
        raise EnvironmentFault(f"no environment server has written {path}: {error.strerror}") from error
    except (WireError, ValueError) as error:
        raise EnvironmentFault(f"{path} is not the address of an environment server: {error}") from error


def get_json(address: Address, path: str, timeout: float) -> Any:
    """The JSON answer to ``GET path``; ``EnvironmentFault`` for anything but a success."""
    request = urllib.request.Request(address.url + path, headers=address.headers)
    # without this an http_proxy variable would send loopback requests, token included, to the proxy
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as response:
            return loads(response.read())
    except urllib.error.HTTPError as error:
        message = error_message(error.read())
        raise EnvironmentFault(f"the environment server refuses {path} ({error.code}): {message}") from error
    except OSError as error:
        raise EnvironmentFault(f"the environment server does not answer {path}: {error}") from error
    except ValueError as error:
        raise EnvironmentFault(f"the environment server's answer to {path} is not JSON: {error}") from error


def error_message(body: bytes) -> str:
    """The text of an error answer, whoever wrote it."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", errors="replace")


_FIELDS = {"url": str, "token": str, "pid": int}
