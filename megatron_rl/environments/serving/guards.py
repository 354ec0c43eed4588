"""Who may ask: looked at before any route."""

from __future__ import annotations

import hmac
from functools import partial

from flask import Flask, request
from flask_restful import abort

MAX_BODY_BYTES = 16 * 2**20
"""A group of 64 completions of 32,000 tokens is about half of it."""


def guard(app: Flask, token: str) -> None:
    """Lets through what carries ``token`` and is not too large."""
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES
    app.before_request(partial(_require_token, token))


def _require_token(token: str) -> None:
    if request.endpoint == "health":
        return
    scheme, _, presented = request.headers.get("Authorization", "").partition(" ")
    # compare_digest: the time taken must not tell how much of the token was right
    if scheme.lower() != "bearer" or not hmac.compare_digest(presented.encode(), token.encode()):
        abort(401, message="a valid bearer token is required; it is in the server's address file")
