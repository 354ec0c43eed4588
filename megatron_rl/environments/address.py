"""Where the environment server listens: a small private file that the server writes and clients read."""

from __future__ import annotations

import http.client
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_rl.environments.wire import WireError, dumps, loads, read_key
from megatron_rl.errors import EnvironmentFault

UNIX = "unix:"
BUSY = (429, 503)
"""Statuses of a server that may grant the same request later."""


class ServerError(EnvironmentFault):
    """No answer, or one that is no success."""

    def __init__(self, message: str, status: int | None = None) -> None:
        """``status`` is None when there was no answer."""
        super().__init__(message)
        self.status = status

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed later: also an old token is replaced when it is read again."""
        return self.status is None or self.status == 401 or self.status in BUSY


@dataclass(frozen=True)
class Address:
    """Everything a client needs; who holds the token may use the server."""

    url: str
    """``http://127.0.0.1:PORT`` or ``unix:/PATH``."""
    token: str
    pid: int

    @property
    def headers(self) -> dict[str, str]:
        """The request headers that carry the token."""
        return {"Authorization": f"Bearer {self.token}"}

    @property
    def socket_path(self) -> str | None:
        """Of a server on a unix socket."""
        return self.url.removeprefix(UNIX) if self.url.startswith(UNIX) else None

    @property
    def base_url(self) -> str:
        """What the paths of requests are appended to."""
        return self.url if self.socket_path is None else "http://localhost"

    def connect(self, timeout: float) -> http.client.HTTPConnection:
        """A connection that is opened by its first request; no proxy variable of the environment has a say."""
        if self.socket_path is None:
            return http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=timeout)
        return _UnixConnection(self.socket_path, timeout)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Opens the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def write_address(path: Path, address: Address) -> None:
    """Writes the file in one step, readable by its owner alone: a reader sees all of it or none."""
    _write_private(path, dumps(asdict(address)), address.pid)


def write_curl_options(path: Path, address: Address) -> None:
    """Writes a file for ``curl -K``: on a command line the token would be for everybody to see."""
    lines = [f'header = "Authorization: Bearer {address.token}"']
    if address.socket_path is not None:
        lines.append(f'unix-socket = "{address.socket_path}"')
    _write_private(path, "\n".join([*lines, ""]), address.pid)


def _write_private(path: Path, text: str, pid: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{pid}")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
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
    """The JSON answer to ``GET path``; ``ServerError`` for anything but a success."""
    connection = address.connect(timeout)
    try:
        connection.request("GET", path, headers=address.headers)
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        reason = str(error) or type(error).__name__
        raise ServerError(f"the environment server does not answer {path}: {reason}") from error
    finally:
        connection.close()
    if response.status != 200:
        what = f"the environment server refuses {path} ({response.status}): {error_message(body)}"
        raise ServerError(what, response.status)
    try:
        return loads(body)
    except ValueError as error:
        raise ServerError(f"the environment server's answer to {path} is not JSON: {error}") from error


def error_message(body: bytes) -> str:
    """The text of an error answer, whoever wrote it."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", errors="replace")


_FIELDS = {"url": str, "token": str, "pid": int}
