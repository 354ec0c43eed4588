"""The environment server: flask-restful under waitress, on the loopback interface or a unix socket.

``create_app`` has the routes, docs/environments.md what they take and give.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import logging
import os
import secrets
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args

import waitress
from flask import Flask, Response, request
from flask_restful import Api, Resource, abort
from waitress.channel import HTTPChannel

from megatron_rl.environments import wire
from megatron_rl.environments.child import HARNESS_PROCESSES, LOAD_SECONDS, die_with_parent
from megatron_rl.environments.config import load_environment_specs
from megatron_rl.environments.results import MAX_MESSAGE, result_to_json
from megatron_rl.environments.service import Service
from megatron_rl.errors import ConfigError, EnvironmentFault
from megatron_rl.json_text import check_bounds, loads
from megatron_rl.types import Grade, Split

PATIENCE_SECONDS = 1.0
"""Longest wait of a grade request for one of the service's places."""
THREADS = 160
"""Eight ranks send sixteen requests each; those that are left over answer the health route."""
RUN_THREADS = 256
"""More where there are harnesses: eight ranks send 32 groups each, and every one has a thread until its rewards."""
MAX_BODY_BYTES = 16 * 2**20
"""A group of 64 completions of 32,000 tokens is about half of it."""
MAX_CONNECTIONS = 900
"""waitress's 100 are less than the ranks of a large node send at once; more than 1024 files few processes may open."""

_Read = TypeVar("_Read")

logger = logging.getLogger(__name__)


class Served(Resource):
    def __init__(self, service: Service) -> None:
        self.service = service


class Health(Served):
    def get(self) -> dict[str, str]:
        return {"status": "ok"}


class Counters(Served):
    def get(self) -> dict[str, Any]:
        """Report what the workers did; the process id shows a restart, after which counters begin at 0."""
        beats = sum(pool.beats for pool in self.service.pools)
        return {"pid": os.getpid(), "counters": self.service.counters(), "beats": beats}


class Environments(Served):
    def get(self, name: str = "") -> dict[str, Any]:
        """Describe what is served: all environments, or one."""
        return self._shown(name) if name else {"items": [self._shown(each) for each in self.service.environments]}

    def _shown(self, name: str) -> dict[str, Any]:
        environment = self.service.environment(name)
        served = asdict(self.service.specs[name].served(environment))
        return served | {"environment": environment.name, "description": environment.description()}


class Rows(Served):
    def get(self, name: str, what: str) -> dict[str, Any]:
        """Return a page of tasks or demonstrations."""
        split = request.args.get("split", "train")
        if split not in get_args(Split):
            abort(422, message=f"split is {split!r}; use one of {', '.join(get_args(Split))}")
        offset = max(request.args.get("offset", 0, type=int), 0)
        limit = request.args.get("limit", 1000, type=int)
        rows = self.service.rows(name, what, split)
        to_json = vars if what == "tasks" else wire.demonstration_to_json
        items = [to_json(row) for row in rows[offset : offset + limit]]
        return {"total": len(rows), "offset": offset, "items": items}


class Graded(Served):
    def post(self, name: str) -> dict[str, Any]:
        """Return a grade for each item, in order; a bad sample is a result of its own, never an exception."""
        service = self.service
        service.environment(name)
        with _place(service.places):
            return _answered(lambda: service.judge(name, _read_items(request.get_data(), wire.item_from_json)))


class GradedGroup(Served):
    def post(self, name: str) -> dict[str, Any]:
        """Return a grade for each answer to one task, in order, of an environment that grades them together."""
        service = self.service
        service.environment(name)
        with _place(service.group_places):
            group = _read_body(request.get_data(), wire.group_from_json)
            return _answered(lambda: service.judge_group(name, *group))


class Ran(Served):
    def post(self, name: str) -> dict[str, Any]:
        """Runs a harness for each item; its processes are killed when the client closes the connection."""
        runs = _read_items(request.get_data(), wire.run_from_json)
        gone = request.environ.get("waitress.client_disconnected", lambda: False)
        return _answered(lambda: self.service.run(name, runs, gone))


@contextlib.contextmanager
def _place(places: threading.BoundedSemaphore) -> Iterator[None]:
    """One of the service's places; answers 429 when none becomes free."""
    if not places.acquire(timeout=PATIENCE_SECONDS):
        abort(429, message="too many requests wait already; come back later")
    try:
        yield
    finally:
        places.release()


def _answered(ask: Callable[[], list[Grade]]) -> dict[str, Any]:
    try:
        return {"items": [result_to_json(result) for result in ask()]}
    except EnvironmentFault as fault:  # of the server itself: no sample is to blame
        logger.error("%s: %s", request.path, fault)
        abort(503, message=str(fault))


def _read_items(body: bytes, read: Callable[[object, str], _Read]) -> list[_Read]:
    """The items of a request."""

    def items(value: object) -> list[_Read]:
        return [read(item, f"items[{index}]") for index, item in enumerate(wire.read_key(value, "items", list))]

    return _read_body(body, items)


def _read_body(body: bytes, read: Callable[[object], _Read]) -> _Read:
    """What is asked for; answers 400 for what is not JSON, 422 for what is no request."""
    try:
        value = loads(body.decode())  # bytes may be in any encoding of Unicode
        check_bounds(value)
    except ValueError as error:
        abort(400, message=f"the body is not JSON: {error}"[:MAX_MESSAGE])
    try:
        return read(value)
    except wire.WireError as error:
        abort(422, message=str(error)[:MAX_MESSAGE])


class _JsonApi(Api):
    """flask-restful leaves unknown URLs and methods to Flask, which answers in HTML."""

    def error_router(self, original_handler: Any, e: Exception) -> Response:
        """Answer in JSON, whatever the error and the URL."""
        return self.handle_error(e)


class Channel(HTTPChannel):
    """A connection that takes the place of an idle one.

    waitress accepts nobody while there are too many connections, and waits two minutes before it closes an idle one:
    a thousand of them, which need no token, keep the health route from answering.
    """

    def __init__(self, server: Any, *arguments: Any, **options: Any) -> None:
        if len(server.active_channels) >= MAX_CONNECTIONS:
            idle = [channel for channel in server.active_channels.values() if not channel.requests]
            if idle:
                min(idle, key=lambda channel: channel.last_activity).will_close = True
        super().__init__(server, *arguments, **options)


def create_app(service: Service) -> Flask:
    """Return the application that serves the environments of ``service`` to whoever presents its token."""
    app = Flask("megatron_rl.environments", static_folder=None)
    app.config["RESTFUL_JSON"] = {"allow_nan": False}  # its default writes NaN, which is not JSON
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES

    @app.before_request
    def require_token() -> None:
        scheme, _, presented = request.headers.get("Authorization", "").partition(" ")
        # compare_digest: the time taken must not tell how much of the token was right
        right = scheme.lower() == "bearer" and hmac.compare_digest(presented.encode(), service.token.encode())
        if not right and request.endpoint != "health":
            abort(401, message="a valid bearer token is required; it is in the server's address file")

    add, one = partial(_JsonApi(app).add_resource, resource_class_args=(service,)), "/v1/environments/<string:name>"
    add(Health, "/v1/health")
    add(Counters, "/v1/counters")
    add(Environments, "/v1/environments", one)
    add(Rows, f"{one}/<any(tasks,demonstrations):what>")
    add(Graded, f"{one}/grade")
    add(GradedGroup, f"{one}/grade_group")
    add(Ran, f"{one}/run")
    return app


def serve(
    config: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    address_file: str | Path | None = None,
    allow_remote: bool = False,
    unix_socket: str | Path | None = None,
    load_timeout: float = LOAD_SECONDS,
    harness_processes: int = HARNESS_PROCESSES,
    parent: int | None = None,
) -> None:
    """Serves the environments of a YAML list until Ctrl-C or the death of the process ``parent``.

    Without an ``address_file`` the token is left in a private folder that the log names. Reading the tasks of a split
    may take ``load_timeout`` seconds.
    """
    refuse_remote(host, allow_remote, "graders would be open to the network over plain HTTP")
    if parent is not None:
        die_with_parent(parent)
    sys.setswitchinterval(0.001)  # for a thread that computes; Python's 5 ms add up for one of many small steps
    # one warning a request while all threads are busy: normal here, and it would fill the log
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    # the log's last line names the module, should it hang or end the process
    begin = partial(logger.info, f"%s{wire.LOADING}environment %r (%s)")
    specs = {spec.name: spec for spec in load_environment_specs(config, begin=begin)}
    environments = {name: spec.create() for name, spec in specs.items()}
    token = secrets.token_urlsafe(32)
    service = Service(environments, token, specs, load_timeout, harness_processes)
    path = unix_socket and str(Path(unix_socket).absolute())
    with contextlib.closing(service):
        try:
            if path and _is_live(path):  # which waitress would replace
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            server = waitress.create_server(
                create_app(service),
                **({"unix_socket": path, "unix_socket_perms": "600"} if path else {"host": host, "port": port}),
                threads=THREADS + (RUN_THREADS if service.harnesses is not None else 0),
                channel_request_lookahead=1,  # else it does not see that a client has gone while its harnesses run
                connection_limit=MAX_CONNECTIONS + 100,
                max_request_body_size=4 * MAX_BODY_BYTES,  # what is too large reaches Flask, which answers in JSON
                recv_bytes=2**16,  # of its 8 KiB a large body takes thousands of turns of the loop that accepts others
                asyncore_use_poll=True,  # select() stops at 1024 descriptors
            )
        except OSError as error:
            where, why = path or f"{host}:{port}", error.strerror or error
            raise ConfigError([f"cannot listen on {where}: {why}; choose another"]) from error
        server.channel_class = Channel
        reachable = "127.0.0.1" if ipaddress.ip_address(host).is_unspecified else host
        url = f"unix:{path}" if path else f"http://{reachable}:{server.effective_port}"
        logger.info("serving %s on %s", ", ".join(environments), url)
        with _announced(wire.Address(url, token, os.getpid()), address_file):
            server.run()
    logger.info("stopped")


def _is_live(path: str) -> bool:
    """Return whether a server listens on that socket, and has not only left it behind."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


@contextlib.contextmanager
def _announced(address: wire.Address, address_file: str | Path | None) -> Iterator[None]:
    """Leaves url and token where clients, or a person with curl, find them: on a command line everybody would."""
    if address_file is not None:
        wire.write_address(Path(address_file), address)
        try:
            yield
        finally:
            Path(address_file).unlink(missing_ok=True)
        return
    unix = address.url.startswith("unix:")
    lines = [f'header = "Authorization: Bearer {address.token}"']
    lines += [f'unix-socket = "{address.url.removeprefix("unix:")}"'] if unix else []
    with tempfile.TemporaryDirectory(prefix="environment_server_") as folder:
        options, url = Path(folder) / "curl", "http://localhost" if unix else address.url
        wire.write_private(options, "\n".join([*lines, ""]))
        logger.info("the token is in %s; try: curl -K %s %s/v1/environments", options, options, url)
        yield


def refuse_remote(host: str, allow_remote: bool, why: str) -> None:
    """Raise ``ConfigError`` for a host that is not loopback, unless it is allowed; ``why`` not."""
    try:
        loopback = ipaddress.IPv4Address(host).is_loopback
    except ValueError as error:
        raise ConfigError([f"host is {host!r}; give an IPv4 address such as 127.0.0.1"]) from error
    if not loopback and not allow_remote:
        raise ConfigError([f"host {host} is not loopback: {why}; use 127.0.0.1 or pass --allow-remote"])
