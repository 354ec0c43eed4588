"""The environment server: flask-restful under waitress, on the loopback interface.

::

    GET  /v1/health                                                   the only one without a token
    GET  /v1/environments
    GET  /v1/environments/<name>
    GET  /v1/environments/<name>/tasks?split&offset&limit
    GET  /v1/environments/<name>/demonstrations?split&offset&limit
    POST /v1/environments/<name>/grade    {"request_id": .., "items": [{"task": .., "transcript": ..}]}
    POST /v1/environments/<name>/step     {"request_id": .., "items": [{"task": .., "state": .., "turn": ..}]}

A grade request answers ``{"items": [..]}`` with a status for each item: one bad sample costs no other.
Every error, of any URL, is JSON: ``{"message": ".."}``; only what is no HTTP request, or twice too large,
gets waitress's plain text.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import secrets
from pathlib import Path
from typing import Any

import waitress
from flask import Flask

from megatron_rl.environments.address import Address, write_address
from megatron_rl.environments.config import load_environment_specs
from megatron_rl.environments.graders import PooledGrading
from megatron_rl.environments.lifeline import follow_parent
from megatron_rl.environments.serving import MAX_BODY_BYTES, create_app
from megatron_rl.errors import ConfigError

THREADS = 4
MAX_CONNECTIONS = 1000
"""waitress's 100 is less than the groups that may wait for a grade at once."""

logger = logging.getLogger(__name__)


def serve(
    config_path: str | Path,
    host: str = "127.0.0.1",
    port: int = 0,
    address_file: str | Path | None = None,
    allow_remote: bool = False,
) -> None:
    """Serves the environments of a YAML list until SIGTERM or the parent's death.

    Port 0 takes a free one; ``address_file`` then tells clients where, and with which token.
    """
    follow_parent()
    _refuse_remote(host, allow_remote)
    specs = {spec.name: spec for spec in load_environment_specs(config_path)}
    environments = {name: spec.create() for name, spec in specs.items()}
    token = secrets.token_urlsafe(32)
    grading = PooledGrading(specs, environments)
    server = _bind(create_app(environments, token, grading), host, port)
    reachable = "127.0.0.1" if ipaddress.ip_address(host).is_unspecified else host
    address = Address(f"http://{reachable}:{server.effective_port}", token, os.getpid())
    logger.info("serving %s on %s", ", ".join(environments), address.url)
    try:
        if address_file is not None:
            write_address(Path(address_file), address)
        server.run()
    finally:
        if address_file is not None:
            Path(address_file).unlink(missing_ok=True)
        grading.close()
    logger.info("stopped")


def _refuse_remote(host: str, allow_remote: bool) -> None:
    try:
        loopback = ipaddress.IPv4Address(host).is_loopback
    except ValueError as error:
        raise ConfigError([f"host is {host!r}; give an IPv4 address such as 127.0.0.1"]) from error
    if not loopback and not allow_remote:
        why = "graders would be open to the network over plain HTTP"
        raise ConfigError([f"host {host} is not loopback: {why}; use 127.0.0.1 or pass --allow-remote"])


def _bind(app: Flask, host: str, port: int) -> Any:
    """waitress's own defaults are every interface and bodies of 1 GiB."""
    # one warning a request while all threads grade: normal here, and it would fill the log
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    try:
        # bodies up to twice the limit reach Flask, which answers 413 in JSON
        return waitress.create_server(
            app,
            host=host,
            port=port,
            threads=THREADS,
            max_request_body_size=2 * MAX_BODY_BYTES,
            connection_limit=MAX_CONNECTIONS,
            asyncore_use_poll=True,  # select() stops at 1024 descriptors
        )
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            advice = "choose another, or 0 for a free one"
            raise ConfigError([f"port {port} on {host} is in use; {advice}"]) from error
        raise ConfigError([f"cannot listen on {host}:{port}: {error.strerror}"]) from error
