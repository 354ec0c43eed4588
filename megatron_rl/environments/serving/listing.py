"""The GET routes: health, counters, environments, pages of tasks and demonstrations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

from flask import request
from flask_restful import Resource, abort

from megatron_rl.environments.serving.service import Service, Serving
from megatron_rl.environments.wire import demonstration_to_json, task_to_json
from megatron_rl.errors import EnvironmentFault
from megatron_rl.types import Split

MAX_PAGE = 5000

logger = logging.getLogger(__name__)


class Health(Resource):
    """Whether the server answers; the only route without a token."""

    def get(self) -> dict[str, str]:
        """``{"status": "ok"}``."""
        return {"status": "ok"}


class ServerCounters(Serving):
    """What the server and its workers did since they started."""

    def get(self) -> dict[str, Any]:
        """``{"pid": .., "counters": {..}, "verdicts": {environment: {..}}}``."""
        return self.service.counts()


class EnvironmentList(Serving):
    """What is served."""

    def get(self) -> dict[str, Any]:
        """One summary each."""
        return {"items": [_summary(self.service, name) for name in self.service.catalog.environments]}


class OneEnvironment(Serving):
    """One of them."""

    def get(self, name: str) -> dict[str, Any]:
        """Its summary and the range of its rewards."""
        environment = self.service.environment(name)
        return {**_summary(self.service, name), "reward_range": list(environment.reward_range)}


class Tasks(Serving):
    """The tasks of a split."""

    def get(self, name: str) -> dict[str, Any]:
        """A page of them."""
        self.service.environment(name)
        return _page(partial(self.service.catalog.tasks, name), task_to_json)


class Demonstrations(Serving):
    """The demonstrations of a split."""

    def get(self, name: str) -> dict[str, Any]:
        """A page of them."""
        self.service.environment(name)
        return _page(partial(self.service.catalog.demonstrations, name), demonstration_to_json)


def _summary(service: Service, name: str) -> dict[str, Any]:
    environment = service.catalog.environments[name]
    return {
        "name": name,
        "weight": service.weights.get(name, 1.0),
        "environment": environment.name,
        "description": environment.description(),
        "evaluation_only": environment.evaluation_only,
        "max_turns": environment.max_turns,
    }


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
