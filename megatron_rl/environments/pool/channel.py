"""JSON values over a stream socket, each after its length: no pickle, so nothing is run by being received."""

from __future__ import annotations

import socket
import struct
import time
from typing import Any

from megatron_rl.environments.wire import dumps, loads

_LENGTH = struct.Struct("!I")
MAX_BYTES = 64 * 2**20


def send(channel: socket.socket, value: object, timeout: float | None = None) -> None:
    """Sends one value; ``OSError`` when the other side is gone or takes longer than ``timeout`` seconds."""
    data = dumps(value).encode()
    channel.settimeout(timeout)
    channel.sendall(_LENGTH.pack(len(data)) + data)


def receive(channel: socket.socket, timeout: float | None = None) -> Any:
    """The next value; ``TimeoutError`` after ``timeout`` seconds, ``ConnectionError`` for a closed channel."""
    deadline = None if timeout is None else time.monotonic() + timeout
    (length,) = _LENGTH.unpack(_read(channel, _LENGTH.size, deadline))
    if length > MAX_BYTES:
        raise ConnectionError(f"a message of {length} bytes is none of ours")
    try:
        return loads(_read(channel, length, deadline))
    except ValueError as error:
        raise ConnectionError(f"the message is not JSON: {error}") from error


def _read(channel: socket.socket, length: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < length:
        if deadline is None:
            channel.settimeout(None)
        else:
            # 0 would mean "do not wait", not "late"
            channel.settimeout(max(deadline - time.monotonic(), 1e-6))
        part = channel.recv(length - len(data))
        if not part:
            raise ConnectionError("the other side closed the channel")
        data += part
    return bytes(data)
