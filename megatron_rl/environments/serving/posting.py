"""The POST routes: ``{"request_id": .., "items": [..]}`` in, one result for each item out, answered once."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from flask import request
from flask_restful import abort

from megatron_rl.environments.base import Environment
from megatron_rl.environments.replay import ReplayConflict
from megatron_rl.environments.serving.service import Serving
from megatron_rl.environments.wire import (
    WireError,
    loads,
    read_key,
    result_to_json,
    task_from_json,
    transcript_from_json,
    turn_from_json,
)
from megatron_rl.types import Item, Task, Transcript, Turn

Posted = TypeVar("Posted", bound=Item)


class PostedItems(Serving, Generic[Posted]):
    """A route says how an item is read; the rest is here."""

    @abstractmethod
    def read(self, value: object, where: str) -> Posted:
        """One item of the request; ``WireError`` for one that is not as it should be."""

    def post(self, name: str) -> dict[str, Any]:
        """``{"items": [..]}``; a request id that was answered before gets the same answer again."""
        environment = self.service.environment(name)
        body = request.get_data()
        value = _parse(body)
        try:
            request_id = read_key(value, "request_id", str, "")
            items = [
                self.read(item, f"items[{index}]")
                for index, item in enumerate(read_key(value, "items", list, ""))
            ]
        except WireError as error:
            abort(422, message=str(error))
        # the path is part of it: an id is not to be used for two routes or environments
        fingerprint = hashlib.sha256(request.path.encode() + b"\0" + body).digest()
        try:
            answer = self.service.replays.answer(
                request_id, fingerprint, lambda: self._results(name, environment, items)
            )
        except ReplayConflict as error:
            abort(409, message=str(error))
        return {"items": answer}

    def _results(self, name: str, environment: Environment, items: Sequence[Posted]) -> list[dict[str, Any]]:
        """A result for each item, in order; a bad item is a result of its own, never an exception."""
        return [result_to_json(result) for result in self.service.grade(name, environment, items)]


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


def _parse(body: bytes) -> Any:
    try:
        return loads(body)
    except ValueError as error:
        abort(400, message=f"the body is not JSON: {error}")
