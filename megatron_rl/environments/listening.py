"""The server's socket, and waitress on it."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import waitress
from flask import Flask
from waitress.channel import HTTPChannel
from waitress.task import ErrorTask, ThreadedTaskDispatcher

from megatron_rl.environments.serving import MAX_BODY_BYTES, WAITING, WORKING
from megatron_rl.environments.wire import dumps
from megatron_rl.errors import ConfigError

THREADS = WORKING + WAITING + 16
"""Those that are left over answer the health route, and those who are turned away."""
MAX_CONNECTIONS = 1000
"""waitress's 100 is less than the ranks of a large node send at once."""
IDLE_SECONDS = 30
CLOSING_SECONDS = 2.0
SOCKET_PATH_BYTES = 107


def listen_tcp(host: str, port: int) -> socket.socket:
    """A socket on an IPv4 address; ``ConfigError`` for one that cannot be had. Port 0 takes a free one."""
    try:
        return socket.create_server((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            advice = "choose another, or 0 for a free one"
            raise ConfigError([f"port {port} on {host} is in use; {advice}"]) from error
        raise ConfigError([f"cannot listen on {host}:{port}: {error.strerror}"]) from error


def listen_unix(path: Path) -> socket.socket:
    """A socket in the file system that its owner alone may use; one that a dead server left is replaced."""
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
        raise ConfigError([f"the socket path {path} is longer than {SOCKET_PATH_BYTES} bytes; use a shorter one"])
    if path.exists() and not path.is_socket():
        raise ConfigError([f"{path} exists and is no socket; choose another --unix-socket"])
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)  # a chmod after bind would leave a moment in which others may connect
    try:
        if path.is_socket() and not _is_served(path):
            path.unlink()
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be made: {error.strerror}"
        raise ConfigError([f"the socket {path} {reason}; choose another --unix-socket"]) from error
    finally:
        os.umask(mask)
    return listener


def hosts_of(host: str, port: int) -> frozenset[str] | None:
    """The Host headers of requests that are meant for this server; None (any) on all interfaces."""
    if ipaddress.ip_address(host).is_unspecified:
        return None
    return frozenset(f"{name}:{port}" for name in (host, "localhost"))


def make_server(app: Flask, listener: socket.socket, closing: Callable[[], None]) -> Any:
    """waitress, which serves ``app`` in its ``run()``; ``closing`` is called when that is told to end."""
    # one warning a request while all threads are busy: normal here, and it would fill the log
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    dispatcher = _Dispatcher(closing)
    dispatcher.set_thread_count(THREADS)
    server = waitress.create_server(
        app,
        _dispatcher=dispatcher,
        sockets=[listener],
        # bodies up to twice the limit reach Flask, which answers 413; its own default is 1 GiB
        max_request_body_size=2 * MAX_BODY_BYTES,
        connection_limit=MAX_CONNECTIONS,
        channel_timeout=IDLE_SECONDS,
        cleanup_interval=5,
        recv_bytes=2**16,  # of its 8 KiB a large body takes thousands of turns of the loop that accepts others
        asyncore_use_poll=True,  # select() stops at 1024 descriptors
    )
    server.channel_class = _Channel
    return server


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        return True


class _Dispatcher(ThreadedTaskDispatcher):
    """waitress waits for its threads before ``run()`` returns: what holds them is ended first."""

    def __init__(self, closing: Callable[[], None]) -> None:
        super().__init__()
        self._closing = closing

    def shutdown(self, cancel_pending: bool = True, timeout: float = CLOSING_SECONDS) -> bool:
        """Called by ``run()`` on SIGTERM and Ctrl-C."""
        self._closing()
        return super().shutdown(cancel_pending, CLOSING_SECONDS)


class _JsonError(ErrorTask):
    """What never reaches the application (no HTTP, far too large) is answered in JSON, too."""

    def execute(self) -> None:
        """Writes the status and ``{"message": ..}``."""
        error = self.request.error
        body = dumps({"message": f"{error.reason}: {error.body}"}).encode()
        self.status = f"{error.code} {error.reason}"
        self.response_headers.append(("Content-Type", "application/json"))
        self.set_close_on_finish()
        self.content_length = len(body)
        self.write(body)


class _Channel(HTTPChannel):
    error_task_class = _JsonError
