"""The environment server: flask-restful under waitress, on the loopback interface.

::

    GET  /v1/health                                                   the only one without a token
    GET  /v1/environments
    GET  /v1/environments/<name>
    GET  /v1/environments/<name>/tasks?split&offset&limit
    GET  /v1/environments/<name>/demonstrations?split&offset&limit
    POST /v1/environments/<name>/grade    {"request_id": .., "items": [{"task": .., "transcript": ..}]}

A grade request answers ``{"items": [..]}`` with a status for each item: one bad sample costs no other.
Every error, of any URL, is JSON: ``{"message": ".."}``; only what is no HTTP request, or twice too large,
gets waitress's plain text.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import ipaddress
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import waitress
from flask import Flask, Response, request
from flask_restful import Api, Resource, abort

from megatron_rl.environments.address import Address, write_address
from megatron_rl.environments.base import Environment
from megatron_rl.environments.catalog import Catalog
from megatron_rl.environments.config import load_environment_specs
from megatron_rl.environments.graders import GradeSamples, PooledGrading, grade_in_process
from megatron_rl.environments.lifeline import follow_parent
from megatron_rl.environments.naming import suggestion
from megatron_rl.environments.replay import ReplayCache, ReplayConflict
from megatron_rl.environments.wire import (
    WireError,
    demonstration_to_json,
    loads,
    read_key,
    result_to_json,
    task_from_json,
    task_to_json,
    transcript_from_json,
)
from megatron_rl.errors import ConfigError, EnvironmentFault
from megatron_rl.types import Split

MAX_BODY_BYTES = 16 * 2**20
"""A group of 64 completions of 32,000 tokens is about half of it."""
MAX_PAGE = 5000
REPLAYED_REQUESTS = 1024
THREADS = 4
MAX_CONNECTIONS = 1000
"""waitress's 100 is less than the groups that may wait for a grade at once."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Service:
    """What the resources share."""

    catalog: Catalog
    replays: ReplayCache
    grade: GradeSamples

    def environment(self, name: str) -> Environment:
        """The environment of that name; answers 404 with the nearest names otherwise."""
        found = self.catalog.environments.get(name)
        if found is None:
            message = f"unknown environment {name!r}{suggestion(name, self.catalog.environments)}"
            abort(404, message=message)
        return found


def create_app(
    environments: Mapping[str, Environment], token: str, grade: GradeSamples = grade_in_process
) -> Flask:
    """The application that serves ``environments`` to whoever presents ``token``."""
    app = Flask("megatron_rl.environments", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES
    app.config["RESTFUL_JSON"] = {"allow_nan": False}  # its default writes NaN, which is not JSON
    app.before_request(partial(_require_token, token))
    api = _JsonApi(app)
    service = Service(Catalog(environments), ReplayCache(REPLAYED_REQUESTS), grade)
    shared = {"resource_class_kwargs": {"service": service}}
    one = "/v1/environments/<string:name>"
    api.add_resource(_Health, "/v1/health", endpoint="health")
    api.add_resource(_Environments, "/v1/environments", **shared)
    api.add_resource(_Environment, one, **shared)
    api.add_resource(_Tasks, f"{one}/tasks", **shared)
    api.add_resource(_Demonstrations, f"{one}/demonstrations", **shared)
    api.add_resource(_Grade, f"{one}/grade", **shared)
    return app


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


def _require_token(token: str) -> None:
    if request.endpoint == "health":
        return
    scheme, _, presented = request.headers.get("Authorization", "").partition(" ")
    # compare_digest: the time taken must not tell how much of the token was right
    if scheme.lower() != "bearer" or not hmac.compare_digest(presented.encode(), token.encode()):
        abort(401, message="a valid bearer token is required; it is in the server's address file")


class _JsonApi(Api):
    """flask-restful leaves unknown URLs and methods to Flask, which answers in HTML."""

    def error_router(self, original_handler: Callable, e: Exception) -> Response:
        return self.handle_error(e)


class _Health(Resource):
    def get(self) -> dict[str, str]:
        return {"status": "ok"}


class _Serving(Resource):
    """A resource that knows the environments."""

    def __init__(self, service: Service) -> None:
        self.service = service


class _Environments(_Serving):
    def get(self) -> dict[str, Any]:
        return {"items": [_summary(name, item) for name, item in self.service.catalog.environments.items()]}


class _Environment(_Serving):
    def get(self, name: str) -> dict[str, Any]:
        environment = self.service.environment(name)
        return {**_summary(name, environment), "reward_range": list(environment.reward_range)}


class _Tasks(_Serving):
    def get(self, name: str) -> dict[str, Any]:
        self.service.environment(name)
        return _page(partial(self.service.catalog.tasks, name), task_to_json)


class _Demonstrations(_Serving):
    def get(self, name: str) -> dict[str, Any]:
        self.service.environment(name)
        return _page(partial(self.service.catalog.demonstrations, name), demonstration_to_json)


class _Grade(_Serving):
    def post(self, name: str) -> dict[str, Any]:
        environment = self.service.environment(name)
        body = request.get_data()
        value = _parse_body(body)
        try:
            request_id = read_key(value, "request_id", str, "")
            items = [
                (
                    task_from_json(read_key(item, "task", dict, f"items[{index}]"), f"items[{index}].task"),
                    transcript_from_json(
                        read_key(item, "transcript", dict, f"items[{index}]"), f"items[{index}].transcript"
                    ),
                )
                for index, item in enumerate(read_key(value, "items", list, ""))
            ]
        except WireError as error:
            abort(422, message=str(error))

        def grade_all() -> list[dict[str, Any]]:
            return [result_to_json(result) for result in self.service.grade(name, environment, items)]

        try:
            fingerprint = hashlib.sha256(name.encode() + b"\0" + body).digest()
            return {"items": self.service.replays.answer(request_id, fingerprint, grade_all)}
        except ReplayConflict as error:
            abort(409, message=str(error))


def _summary(name: str, environment: Environment) -> dict[str, Any]:
    return {
        "name": name,
        "environment": environment.name,
        "description": environment.description(),
        "evaluation_only": environment.evaluation_only,
    }


def _parse_body(body: bytes) -> Any:
    try:
        return loads(body)
    except ValueError as error:
        abort(400, message=f"the body is not JSON: {error}")


def _page(read: Callable[[Split], Sequence[Any]], to_json: Callable[[Any], Any]) -> dict[str, Any]:
    """The part of a list that the query asks for."""
    split = request.args.get("split", "train")
    if split not in get_args(Split):
        abort(422, message=f"split is {split!r}; use one of {', '.join(get_args(Split))}")
    offset = _query_integer("offset", default=0, lowest=0, highest=2**31)
    limit = _query_integer("limit", default=1000, lowest=1, highest=MAX_PAGE)
    try:
        rows = read(split)
    except EnvironmentFault as fault:
        logger.exception("a list could not be read")
        abort(500, message=str(fault))
    items = [to_json(row) for row in rows[offset : offset + limit]]
    return {"total": len(rows), "offset": offset, "items": items}


def _query_integer(name: str, default: int, lowest: int, highest: int) -> int:
    text = request.args.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= 10) or not lowest <= int(text) <= highest:
        abort(422, message=f"{name} is {text!r}; give an integer from {lowest} to {highest}")
    return int(text)
