"""The POST routes: ``{"request_id": .., "items": [..]}`` in, one result for each item out, answered once."""

from __future__ import annotations

import hashlib
import logging
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from flask import request
from flask_restful import abort

from megatron_rl.environments.base import Environment
from megatron_rl.environments.replay import ReplayConflict
from megatron_rl.environments.serving.guards import unavailable
from megatron_rl.environments.serving.service import Serving
from megatron_rl.environments.serving.strict import parse
from megatron_rl.environments.wire import (
    MAX_MESSAGE,
    WireError,
    read_key,
    result_to_json,
    task_from_json,
    transcript_from_json,
    turn_from_json,
)
from megatron_rl.errors import EnvironmentFault
from megatron_rl.types import Item, Task, Transcript, Turn

logger = logging.getLogger(__name__)

MAX_ITEMS = 4096
MAX_REQUEST_ID = 200
"""Characters; the ids of answered requests are kept."""

Posted = TypeVar("Posted", bound=Item)


class PostedItems(Serving, Generic[Posted]):
    """A route says how an item is read; the rest is here."""

    @abstractmethod
    def read(self, value: object, where: str) -> Posted:
        """One item of the request; ``WireError`` for one that is not as it should be."""

    def post(self, name: str) -> dict[str, Any]:
        """``{"items": [..]}``; a request id that was answered before gets the same answer again."""
        environment = self.service.environment(name)
        if request.mimetype != "application/json":
            abort(415, message=f"the content type is {request.mimetype[:200]!r}; use application/json")
        body = request.get_data()
        with self.service.reading:
            request_id, items = self._read(body)
        # the path is part of it: an id is not to be used for two routes or environments
        fingerprint = hashlib.sha256(request.path.encode() + b"\0" + body).digest()
        try:
            answer = self.service.replays.answer(
                request_id, fingerprint, lambda: self._results(name, environment, items)
            )
        except ReplayConflict as error:
            abort(409, message=str(error))
        except EnvironmentFault as fault:  # of the server itself: no sample is to blame
            logger.error("%s: %s", request.path, fault)
            unavailable(str(fault))
        if self.service.admission.closed:  # its workers were ended: the results say nothing about the samples
            unavailable("the environment server is closing")
        return {"items": answer}

    def _results(self, name: str, environment: Environment, items: Sequence[Posted]) -> list[dict[str, Any]]:
        """A result for each item, in order; a bad item is a result of its own, never an exception."""
        results = self.service.grade(name, environment, items)
        self.service.counters.add_results(name, [result for result in results if result.continuation is None])
        return [result_to_json(result) for result in results]

    def _read(self, body: bytes) -> tuple[str, list[Posted]]:
        """The request's id and items; answers 400 for what is not JSON, 422 for what is no request."""
        try:
            value = parse(body)
        except ValueError as error:
            abort(400, message=f"the body is not JSON: {error}")
        try:
            request_id = read_key(value, "request_id", str, "")
            if not 0 < len(request_id) <= MAX_REQUEST_ID:
                raise WireError(f"request_id has {len(request_id)} characters; give 1 to {MAX_REQUEST_ID}")
            items = read_key(value, "items", list, "")
            if len(items) > MAX_ITEMS:
                raise WireError(f"items has {len(items)} elements; give {MAX_ITEMS} at most")
            return request_id, [self.read(item, f"items[{index}]") for index, item in enumerate(items)]
        except WireError as error:
            abort(422, message=str(error)[:MAX_MESSAGE])


class Grade(PostedItems[tuple[Task, Transcript]]):
    """Rewards of finished transcripts; an item is ``{"task": .., "transcript": ..}``."""

    def read(self, value: object, where: str) -> tuple[Task, Transcript]:
        """The sample of an item."""
        task = task_from_json(read_key(value, "task", dict, where), f"{where}.task")
        transcript = transcript_from_json(read_key(value, "transcript", dict, where), f"{where}.transcript")
        return task, transcript


class Step(PostedItems[tuple[Task, Any, Turn]]):
    """Answers to turns of the model; an item is ``{"task": .., "state": .., "turn": ..}``."""

    def read(self, value: object, where: str) -> tuple[Task, Any, Turn]:
        """The task, the state of the conversation, and what the model said."""
        task = task_from_json(read_key(value, "task", dict, where), f"{where}.task")
        turn = turn_from_json(read_key(value, "turn", dict, where), f"{where}.turn")
        return task, value.get("state"), turn
