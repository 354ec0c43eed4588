"""The environment server: flask-restful under waitress, on the loopback interface or a unix socket.

::

    GET  /v1/health                                                   the only one without a token
    GET  /v1/counters
    GET  /v1/environments
    GET  /v1/environments/<name>
    GET  /v1/environments/<name>/tasks?split&offset&limit
    GET  /v1/environments/<name>/demonstrations?split&offset&limit
    POST /v1/environments/<name>/grade    {"request_id": .., "items": [{"task": .., "transcript": ..}]}
    POST /v1/environments/<name>/step     {"request_id": .., "items": [{"task": .., "state": .., "turn": ..}]}

A grade request answers ``{"items": [..]}`` with a status for each item: one bad sample costs no other.
Every error, of any URL, is JSON: ``{"message": ".."}``. 429 and 503 say when to come back.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.environments.address import Address, write_address, write_curl_options
from megatron_rl.environments.config import load_environment_specs
from megatron_rl.environments.graders import PooledGrading
from megatron_rl.environments.lifeline import follow_parent
from megatron_rl.environments.listening import hosts_of, listen_tcp, listen_unix, make_server
from megatron_rl.environments.loading.supervise import LOAD_SECONDS
from megatron_rl.environments.process import LOADING
from megatron_rl.environments.serving import Admission, create_app
from megatron_rl.errors import ConfigError

SWITCH_SECONDS = 0.001
"""A thread that computes lets others in so often; Python's 5 ms add up for a request of many small steps."""

logger = logging.getLogger(__name__)


def serve(
    config_path: str | Path,
    host: str = "127.0.0.1",
    port: int = 0,
    address_file: str | Path | None = None,
    allow_remote: bool = False,
    unix_socket: str | Path | None = None,
    load_seconds: float = LOAD_SECONDS,
) -> None:
    """Serves the environments of a YAML list until SIGTERM or the parent's death.

    Port 0 takes a free one; ``address_file`` then tells clients where, and with which token. Without it the
    token is left in a private folder that the log names. ``unix_socket`` takes the place of host and port. Reading
    the tasks of a split may take ``load_seconds``.
    """
    follow_parent()
    _refuse_remote(host, allow_remote)
    sys.setswitchinterval(SWITCH_SECONDS)
    # the log's last line names the module, should it hang or end the process
    specs = {spec.name: spec for spec in load_environment_specs(config_path, begin=_log)}
    environments = {name: spec.create() for name, spec in specs.items()}
    token, admission = secrets.token_urlsafe(32), Admission()
    with contextlib.ExitStack() as stack:
        if unix_socket is not None:
            path = Path(unix_socket).absolute()
            listener, url, hosts = listen_unix(path), f"unix:{path}", None
            stack.callback(path.unlink, missing_ok=True)
        else:
            listener = listen_tcp(host, port)
            port = listener.getsockname()[1]
            reachable = "127.0.0.1" if ipaddress.ip_address(host).is_unspecified else host
            url, hosts = f"http://{reachable}:{port}", hosts_of(host, port)
        stack.enter_context(listener)
        grading = PooledGrading(specs, environments)
        stack.callback(grading.close)
        app = create_app(
            environments, token, grading, hosts=hosts, admission=admission, pool_counters=grading.counters,
            weights={name: spec.weight for name, spec in specs.items()}, list_seconds=load_seconds,
        )  # fmt: skip

        def closing() -> None:
            admission.close()
            grading.close()

        server = make_server(app, listener, closing)
        address = Address(url, token, os.getpid())
        logger.info("serving %s on %s", ", ".join(environments), url)
        stack.enter_context(_announced(address, address_file))
        server.run()
    logger.info("stopped")


def _log(_: int, where: str, name: str, doing: str) -> None:
    logger.info("%s%senvironment %r (%s)", where, LOADING, name, doing)


@contextlib.contextmanager
def _announced(address: Address, address_file: str | Path | None) -> Iterator[None]:
    """Leaves url and token where clients, or a person with curl, find them; removed at the end."""
    if address_file is not None:
        write_address(Path(address_file), address)
        try:
            yield
        finally:
            Path(address_file).unlink(missing_ok=True)
        return
    with tempfile.TemporaryDirectory(prefix="environment_server_") as folder:
        options = Path(folder) / "curl"
        write_curl_options(options, address)
        logger.info("the token is in %s; try: curl -K %s %s/v1/environments", options, options, address.base_url)
        yield


def _refuse_remote(host: str, allow_remote: bool) -> None:
    try:
        loopback = ipaddress.IPv4Address(host).is_loopback
    except ValueError as error:
        raise ConfigError([f"host is {host!r}; give an IPv4 address such as 127.0.0.1"]) from error
    if not loopback and not allow_remote:
        why = "graders would be open to the network over plain HTTP"
        raise ConfigError([f"host {host} is not loopback: {why}; use 127.0.0.1 or pass --allow-remote"])
