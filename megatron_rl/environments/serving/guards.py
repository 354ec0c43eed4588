"""Who may ask, and how much at once: looked at before any route."""

from __future__ import annotations

import hmac
from collections.abc import Collection
from functools import partial
from typing import NoReturn

from flask import Flask, Response, g, request
from flask_restful import abort

from megatron_rl.environments.serving.admission import Admission
from megatron_rl.environments.serving.counters import Counters

MAX_BODY_BYTES = 16 * 2**20
"""A group of 64 completions of 32,000 tokens is about half of it."""
RETRY_SECONDS = 1
QUICK = ("health", "counters")
"""Endpoints that take no time, and must answer when everything else is busy."""


def guard(
    app: Flask, token: str, hosts: Collection[str] | None, admission: Admission, counters: Counters
) -> None:
    """Lets through what names one of ``hosts``, carries ``token`` and finds a place. None allows any host."""
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES
    app.before_request(partial(_require_host, hosts))
    app.before_request(partial(_require_token, token))
    app.before_request(partial(_require_place, admission, counters))
    app.teardown_request(partial(_leave, admission))
    app.after_request(_tell_when_to_return)


def unavailable(message: str) -> NoReturn:
    """Answers 503: the same request may succeed later."""
    abort(503, message=message)


def _require_host(hosts: Collection[str] | None) -> None:
    """A page that a browser loaded from elsewhere may send requests here under its own host name."""
    if hosts is not None and request.headers.get("Host", "").lower() not in hosts:
        abort(403, message=f"host is {request.headers.get('Host', '')[:200]!r}; use {' or '.join(sorted(hosts))}")


def _require_token(token: str) -> None:
    if request.endpoint == "health":
        return
    scheme, _, presented = request.headers.get("Authorization", "").partition(" ")
    # compare_digest: the time taken must not tell how much of the token was right
    if scheme.lower() != "bearer" or not hmac.compare_digest(presented.encode(), token.encode()):
        abort(401, message="a valid bearer token is required; it is in the server's address file")


def _require_place(admission: Admission, counters: Counters) -> None:
    if request.endpoint in QUICK or request.endpoint is None:
        return
    counters.add("requests")
    if admission.closed:
        unavailable("the environment server is closing")
    if not admission.enter():
        counters.add("turned_away")
        abort(429, message="too many requests wait already; come back later")
    g.has_place = True


def _leave(admission: Admission, error: BaseException | None) -> None:
    if g.pop("has_place", False):
        admission.leave()


def _tell_when_to_return(response: Response) -> Response:
    if response.status_code in (429, 503):
        response.headers["Retry-After"] = str(RETRY_SECONDS)
    return response
